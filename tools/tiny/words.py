"""Facts about words and nature: opposites, plurals, past tenses, animals, colours, planets, translations.

Owns these tables and the exchanges that ask for them.
"""

from __future__ import annotations

import random

from tools.tiny.exchange import Exchange, article, ask, capitalized, listed, phrase, word

_OPPOSITES = """hot cold, big small, tall short, fast slow, old young, happy sad, light dark, hard soft,
high low,
near far, open closed, rich poor, strong weak, wet dry, early late, full empty, clean dirty, loud quiet,
thick thin, wide narrow, heavy lightweight, up down, left right, in out, day night, black white,
good bad, true false, correct wrong, first last, deep shallow, sharp blunt, sweet bitter, smooth rough,
brave cowardly, cheap expensive, easy difficult, begin end, love hate, buy sell, push pull, win lose,
come go, give take, laugh cry, war peace, friend enemy, north south, east west, summer winter,
always never, inside outside, above below, before after, top bottom, front back, more less, yes no,
ancient modern, safe dangerous, simple complex, polite rude, awake asleep, alive dead, arrive leave,
remember forget, float sink, rise fall, tight loose, straight crooked, guilty innocent, public private"""

_PLURALS = """cat cats, dog dogs, book books, house houses, tree trees, car cars, city cities, baby babies,
lady ladies, story stories, party parties, berry berries, box boxes, fox foxes, bus buses,
class classes, dish dishes, watch watches, church churches, potato potatoes, tomato tomatoes,
hero heroes, child children, man men, woman women, tooth teeth, foot feet, goose geese, mouse mice,
ox oxen, leaf leaves, knife knives, wife wives, life lives, wolf wolves, shelf shelves, loaf loaves,
half halves, thief thieves, sheep sheep, fish fish, deer deer, key keys, toy toys, boy boys, day days,
monkey monkeys, bird birds, flower flowers, apple apples, table tables, window windows, river rivers,
mountain mountains, country countries, family families, butterfly butterflies, cherry cherries,
brush brushes, glass glasses, bench benches, peach peaches, piano pianos, photo photos, person people,
computer computers, letter letters, number numbers, garden gardens, teacher teachers, island islands,
horse horses, lamp lamps"""

_PASTS = """go went, come came, see saw, eat ate, drink drank, run ran, swim swam, sing sang, begin began,
give gave, take took, make made, write wrote, read read, speak spoke, break broke, choose chose,
drive drove, ride rode, rise rose, fly flew, grow grew, know knew, throw threw, draw drew, buy bought,
bring brought, think thought, catch caught, teach taught, sell sold, tell told, find found, feel felt,
keep kept, sleep slept, leave left, meet met, lose lost, win won, sit sat, stand stood, hold held,
hear heard, say said, pay paid, send sent, build built, spend spent, cut cut, put put, let let,
walk walked, talk talked, play played, help helped, work worked, look looked, open opened, close closed,
cook cooked, dance danced, laugh laughed, jump jumped, smile smiled, study studied, carry carried,
try tried, stop stopped, plan planned, live lived, love loved, learn learned, be was, have had, do did,
fall fell, forget forgot, get got, hide hid, shine shone, wear wore, wake woke, understand understood"""

_ANIMALS = """dog|barks|puppy|a mammal
cat|meows|kitten|a mammal
cow|moos|calf|a mammal
sheep|bleats|lamb|a mammal
horse|neighs|foal|a mammal
pig|oinks|piglet|a mammal
duck|quacks|duckling|a bird
hen|clucks|chick|a bird
goose|honks|gosling|a bird
lion|roars|cub|a mammal
wolf|howls|pup|a mammal
frog|croaks|tadpole|an amphibian
bee|buzzes|larva|an insect
owl|hoots|owlet|a bird
snake|hisses|snakelet|a reptile
donkey|brays|foal|a mammal
goat|bleats|kid|a mammal
mouse|squeaks|pup|a mammal
bear|growls|cub|a mammal
elephant|trumpets|calf|a mammal
crow|caws|chick|a bird
turkey|gobbles|poult|a bird
pigeon|coos|squab|a bird
monkey|chatters|infant|a mammal
cricket|chirps|nymph|an insect"""

_COLOURS = """the sky on a clear day blue, grass green, snow white, coal black, a ripe banana yellow,
a ripe tomato red, blood red, milk white, a lemon yellow, the night sky black, a carrot orange,
a pumpkin orange, chocolate brown, an elephant grey, a flamingo pink, an emerald green, a ruby red,
a sapphire blue, a crow black, a polar bear white, a fire engine red, a lime green, a strawberry red,
the sun in drawings yellow, salt white, a frog green, a lavender flower purple, an aubergine purple,
cotton white, rust brown"""

PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")

_PLANET_FACTS = (
    ("is the largest planet", "Jupiter"),
    ("is the smallest planet", "Mercury"),
    ("is closest to the Sun", "Mercury"),
    ("is farthest from the Sun", "Neptune"),
    ("is called the red planet", "Mars"),
    ("is famous for its bright rings", "Saturn"),
    ("is our home", "Earth"),
    ("is the hottest planet", "Venus"),
    ("has the Great Red Spot", "Jupiter"),
    ("rotates on its side", "Uranus"),
)

# ruff: noqa: E501, RUF001 (the table below is a table: one word a line, in the scripts themselves)
_TRANSLATIONS = """hello|bonjour|hallo|hola|ciao|привет|γεια|こんにちは|你好|안녕하세요|नमस्ते|مرحبا
thank you|merci|danke|gracias|grazie|спасибо|ευχαριστώ|ありがとう|谢谢|감사합니다|धन्यवाद|شكرا
goodbye|au revoir|auf Wiedersehen|adiós|arrivederci|до свидания|αντίο|さようなら|再见|안녕히 가세요|अलविदा|وداعا
yes|oui|ja|sí|sì|да|ναι|はい|是|네|हाँ|نعم
no|non|nein|no|no|нет|όχι|いいえ|不|아니요|नहीं|لا
water|l'eau|Wasser|agua|acqua|вода|νερό|水|水|물|पानी|ماء
bread|le pain|Brot|pan|pane|хлеб|ψωμί|パン|面包|빵|रोटी|خبز
cat|le chat|Katze|gato|gatto|кошка|γάτα|猫|猫|고양이|बिल्ली|قطة
dog|le chien|Hund|perro|cane|собака|σκύλος|犬|狗|개|कुत्ता|كلب
house|la maison|Haus|casa|casa|дом|σπίτι|家|房子|집|घर|بيت
book|le livre|Buch|libro|libro|книга|βιβλίο|本|书|책|किताब|كتاب
sun|le soleil|Sonne|sol|sole|солнце|ήλιος|太陽|太阳|태양|सूरज|شمس
moon|la lune|Mond|luna|luna|луна|φεγγάρι|月|月亮|달|चाँद|قمر
tree|l'arbre|Baum|árbol|albero|дерево|δέντρο|木|树|나무|पेड़|شجرة
friend|l'ami|Freund|amigo|amico|друг|φίλος|友達|朋友|친구|दोस्त|صديق
one|un|eins|uno|uno|один|ένα|一|一|하나|एक|واحد
two|deux|zwei|dos|due|два|δύο|二|二|둘|दो|اثنان
three|trois|drei|tres|tre|три|τρία|三|三|셋|तीन|ثلاثة"""
TRANSLATION_LANGUAGES = [
    "French",
    "German",
    "Spanish",
    "Italian",
    "Russian",
    "Greek",
    "Japanese",
    "Chinese",
    "Korean",
    "Hindi",
    "Arabic",
]
TRANSLATIONS = tuple(tuple(line.split("|")) for line in _TRANSLATIONS.splitlines())


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """Comma-separated entries, each split at its last space."""
    entries = (entry.rsplit(" ", 1) for entry in listed(text))
    return tuple((first, second) for first, second in entries)


OPPOSITES = _pairs(_OPPOSITES)
PLURALS = _pairs(_PLURALS)
PASTS = _pairs(_PASTS)
COLOUR_FACTS = _pairs(_COLOURS)
ANIMALS = tuple(tuple(line.split("|")) for line in _ANIMALS.splitlines())

_OPPOSITE_QUESTIONS = (
    "What would be the opposite of {0}?",
    "What is the opposite of {0}?",
    "Give me the opposite of {0}.",
    "Which word means the opposite of {0}?",
    "Name an antonym of {0}.",
    "What is the antonym of {0}?",
    "Say the opposite: {0}",
    "I need a word that means the opposite of {0}.",
    "Opposite of {0}?",
    "Tell me the opposite of {0}.",
    "What word is the opposite of {0}?",
    "Do you know the opposite of {0}?",
    "Can you tell me the opposite of {0}?",
    "Find the opposite of {0}.",
    "Please name the opposite of {0}.",
    "Which word is the opposite of {0}?",
    "What's the opposite of {0}?",
)
_PLURAL_QUESTIONS = (
    "What would be the plural of {0}?",
    "What is the plural of {0}?",
    "Give me the plural of {0}.",
    "How do you write the plural of {0}?",
    "One {0}, two what?",
    "Make this word plural: {0}",
    "What is the plural form of {0}?",
    "There is one {0}. How do I say it when there are many?",
    "Plural of {0}?",
    "Tell me the plural of {0}.",
    "What's the plural of {0}?",
    "Do you know the plural of {0}?",
    "Can you tell me the plural of {0}?",
    "Please give me the plural of {0}.",
    "Write the plural of {0}.",
    "What is {0} in the plural?",
    "Which word is the plural of {0}?",
)
_PAST_QUESTIONS = (
    "What would be the past tense of {0}?",
    "What is the past tense of {0}?",
    "Give me the past tense of {0}.",
    "Put this verb into the past tense: {0}",
    "What is the past form of {0}?",
    "Today I {0}. What did I do yesterday? Give the verb.",
    "How do you say {0} in the past?",
    "Past tense of {0}?",
    "What is the simple past of {0}?",
    "Tell me the past tense of {0}.",
    "What's the past tense of {0}?",
    "Do you know the past tense of {0}?",
    "Can you tell me the past tense of {0}?",
    "Please give me the past tense of {0}.",
    "Write the past tense of {0}.",
    "Which word is the past tense of {0}?",
    "What is {0} in the past tense?",
)


def _pair_exchange(
    rng: random.Random,
    kind: str,
    pairs: tuple[tuple[str, str], ...],
    questions: tuple[str, ...],
    answers: tuple[str, ...],
) -> Exchange:
    given, wanted = rng.choice(pairs)
    index, question = phrase(rng, questions)
    shown = rng.choice((given, given, given, f'"{given}"', f"'{given}'"))
    answer = rng.choice(answers).format(given, wanted, capitalized(wanted), shown)
    return ask(question.format(shown), answer, word(wanted), key=f"{kind}|{given}|{index}")


def opposites(rng: random.Random) -> Exchange:
    """The opposite of a word, in both directions."""
    answers = ("The opposite of {3} is {1}.", "The opposite of {0} is {1}.", "{2}.", "It is {1}.")
    flipped = tuple((second, first) for first, second in OPPOSITES)
    return _pair_exchange(rng, "opposites", OPPOSITES + flipped, _OPPOSITE_QUESTIONS, answers)


def plurals(rng: random.Random) -> Exchange:
    """The plural of a noun."""
    answers = ("The plural of {3} is {1}.", "The plural of {0} is {1}.", "{2}.", "One {0}, two {1}.")
    return _pair_exchange(rng, "plurals", PLURALS, _PLURAL_QUESTIONS, answers)


def pasts(rng: random.Random) -> Exchange:
    """The past tense of a verb."""
    answers = ("The past tense of {3} is {1}.", "The past tense of {0} is {1}.", "{2}.", "It is {1}.")
    return _pair_exchange(rng, "pasts", PASTS, _PAST_QUESTIONS, answers)


def animals(rng: random.Random) -> Exchange:
    """The sound, the young or the class of an animal."""
    name, sound, young, group = rng.choice(ANIMALS)
    the_name = article(name)
    aspect = rng.randrange(3)
    if aspect == 0:
        questions = (
            f"What sound does {the_name} make?",
            f"What does {the_name} do when it makes a sound?",
            f"Which sound comes from {the_name}?",
            f"How does {the_name} sound?",
            f"Complete the sentence: A dog barks and {the_name} ...",
            f"Tell me the sound of {the_name}.",
        )
        answers, wanted = (f"{capitalized(the_name)} {sound}.", f"It {sound}."), sound
    elif aspect == 1:
        questions = (
            f"What is a baby {name} called?",
            f"What do you call a young {name}?",
            f"What is the name for a young {name}?",
            f"What is the young of {the_name} called?",
            f"Tell me the word for a baby {name}.",
            f"How do you call the baby of {the_name}?",
        )
        answers, wanted = (
            (f"A baby {name} is called {article(young)}.", f"A young {name} is {article(young)}."),
            young,
        )
    else:
        questions = (
            f"What kind of animal is {the_name}?",
            f"Is {the_name} a mammal, a bird or something else?",
            f"To which group of animals does {the_name} belong?",
            f"Which class of animals is {the_name} in?",
            f"What type of animal is {the_name}?",
            f"Tell me what group {the_name} belongs to.",
        )
        answers, wanted = (f"{capitalized(the_name)} is {group}.", f"It is {group}."), group
    index, question = phrase(rng, questions)
    return ask(question, rng.choice(answers), word(wanted), key=f"animals|{name}|{aspect}|{index}")


def colours(rng: random.Random) -> Exchange:
    """The usual colour of a thing."""
    thing, colour = rng.choice(COLOUR_FACTS)
    index, question = phrase(
        rng,
        (
            f"What colour is {thing}?",
            f"What color is {thing}?",
            f"Which colour does {thing} have?",
            f"Tell me the colour of {thing}.",
            f"What is the colour of {thing}?",
            f"If I paint {thing}, which colour do I need?",
            f"Name the color of {thing}.",
            f"I want to draw {thing}. Which colour should I take?",
        ),
    )
    answer = rng.choice((f"{capitalized(thing)} is {colour}.", f"It is {colour}.", f"{capitalized(colour)}."))
    return ask(question, answer, word(colour), key=f"colours|{thing}|{index}")


def planets(rng: random.Random) -> Exchange:
    """The order of the planets and what each is known for."""
    if rng.random() < 0.5:
        position = rng.randrange(8)
        planet, fact = PLANETS[position], f"is the {_ORDINALS[position]} planet from the Sun"
    else:
        fact, planet = rng.choice(_PLANET_FACTS)
    index, question = phrase(
        rng,
        (
            f"Which planet {fact}?",
            f"What planet {fact}?",
            f"Name the planet that {fact}.",
            f"Tell me which planet {fact}.",
            f"Do you know which planet {fact}?",
            f"One planet {fact}. Which one?",
            f"In the solar system, which planet {fact}?",
            f"I am looking for the planet that {fact}.",
            f"Can you name the planet that {fact}?",
            f"Please name the planet that {fact}.",
            f"Can you tell me which planet {fact}?",
            f"Which of the planets {fact}?",
            f"Which planet is it that {fact}?",
            f"Do you know the planet that {fact}?",
            f"What is the name of the planet that {fact}?",
        ),
    )
    answer = rng.choice((f"{planet} {fact}.", f"It is {planet}.", f"{planet}."))
    return ask(question, answer, word(planet), key=f"planets|{fact}|{index}")


def translations(rng: random.Random) -> Exchange:
    """A common word in another language and script."""
    english, *foreign = rng.choice(TRANSLATIONS)
    column = rng.randrange(len(TRANSLATION_LANGUAGES))
    language, wanted = TRANSLATION_LANGUAGES[column], foreign[column]
    index, question = phrase(
        rng,
        (
            f'How do you say "{english}" in {language}?',
            f"How do you say {english} in {language}?",
            f"What is {english} in {language}?",
            f"Translate into {language}: {english}",
            f'Translate "{english}" into {language}.',
            f"What is the {language} word for {english}?",
            f"Give me the {language} for {english}.",
            f"Tell me how to say {english} in {language}.",
            f"In {language}, what is {english}?",
        ),
    )
    answer = rng.choice((f'"{english}" in {language} is {wanted}.', f"{wanted}", f"It is {wanted}."))
    return ask(question, answer, word(wanted), key=f"translations|{english}|{language}|{index}")

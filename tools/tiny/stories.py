"""Made-up texts: introductions, stories, poems and lists, all from small grammars with much variety."""

from __future__ import annotations

import random

from tools.tiny.exchange import article, capitalized, listed
from tools.tiny.people import COLOURS, FIRST_NAMES, FOODS, HOBBIES, PET_NAMES, PETS, person

_PLACES = listed(
    """a small village by the sea, a quiet town in the mountains, an old house near the forest, a busy city,
a farmhouse on a hill, a lighthouse on a lonely island, a castle above the river,
a garden full of roses, a little room above a bakery, a wooden cabin at the lake"""
)
_THINGS = listed(
    """a silver key, an old map, a broken clock, a letter without a name, a small wooden box, a blue stone,
a strange coin, a golden feather, a forgotten book, a tiny lamp, a bell that made no sound,
a red umbrella"""
)
_FEELINGS = listed("""happy, curious, tired, afraid, surprised, excited, calm, proud, nervous, hopeful""")
_TRAITS = listed(
    """brave, kind, clever, shy, patient, cheerful, careful, honest, funny, gentle, stubborn, friendly"""
)
_WEATHER = listed(
    """the sun was shining, it was raining, a cold wind was blowing, snow covered the roofs,
fog lay over the fields, the stars were bright, the air smelled of rain, the first flowers were open"""
)
_GOALS = listed(
    """find the hidden door, learn the old song, bring the lost bird home, see the world behind the mountains,
help the people of the village, build a boat, find a true friend, solve the riddle of the tower,
plant a tree on the moon hill, win the great race"""
)
_HELPERS = listed(
    """an old woman, a talking fox, a friendly giant, a young sailor, a wise owl, a tired king, a small robot,
a travelling musician, a girl with red shoes, a shepherd"""
)
_LESSONS = listed(
    """that patience is stronger than force, that a friend is worth more than gold, that small steps lead far,
that it is good to ask for help, that courage begins with a single word, that every door has a key,
that home is where someone waits for you, that kindness is never wasted"""
)


def introduction(rng: random.Random, *, greeting: str = "Hello, my name is") -> str:
    """Someone introduces themselves, after the greeting."""
    someone = person(rng, first=rng.choice(FIRST_NAMES))
    name = someone.name if rng.random() < 0.4 else someone.first
    age = rng.randrange(18, 80)
    job = article(someone.job)
    opening = rng.choice(
        (
            f"{name} and I am {job} from {someone.city}.",
            f"{name}. I am {job} and I live in {someone.city}.",
            f"{name}. I am {age} years old and I live in {someone.city}.",
            f"{name} and I am {age} years old.",
            f"{name}, and I work as {job} in {someone.city}.",
        )
    )
    pet, pet_name = rng.choice(PETS), rng.choice(PET_NAMES)
    hobby, other = rng.sample(HOBBIES, 2)
    sentences = [
        rng.choice(
            (
                f"In my free time I enjoy {hobby}.",
                f"I like {hobby} and {other}.",
                f"My favourite hobby is {hobby}.",
            )
        ),
        rng.choice((f"I have a {pet} called {pet_name}.", f"My {pet} {pet_name} is always with me.")),
        f"My favourite colour is {rng.choice(COLOURS)}.",
        f"My favourite food is {rng.choice(FOODS)}.",
        f"I have worked as {job} for {rng.randrange(2, 12)} years."
        if age > 32
        else "I am still learning something new every day.",
        rng.choice(("My friends say that I am {0}.", "People tell me that I am {0}.")).format(
            rng.choice(_TRAITS)
        ),
        "On Sundays I like to sleep a little longer.",
        f"One day I would like to {rng.choice(_GOALS)}.",
        f"I grew up in {rng.choice(_PLACES)}.",
    ]
    chosen = rng.sample(sentences, rng.randrange(2, 6))
    closing = rng.choice(
        ("", "", " It is nice to meet you.", " I am happy to be here.", " I look forward to meeting you.")
    )
    return f"{greeting} {opening} {' '.join(chosen)}{closing}"


MOST_SCENES = 24
"""How many kinds of scenes there are; no story has the same kind twice."""


def _scenes(rng: random.Random, name: str, pronoun: str) -> list[str]:
    """Every kind of scene once, in the order in which a story tells them; each is two or three sentences."""
    helpers, things = rng.sample(_HELPERS, 5), rng.sample(_THINGS, 4)
    places, weather = rng.sample(_PLACES, 3), rng.sample(_WEATHER, 4)
    they, their = capitalized(pronoun), {"he": "his", "she": "her"}[pronoun]
    traits, feelings, foods = rng.sample(_TRAITS, 3), rng.sample(_FEELINGS, 4), rng.sample(FOODS, 3)
    animal, colour, days = rng.choice(PETS), rng.choice(COLOURS), rng.randrange(2, 10)
    return [
        f"One morning, when {weather[0]}, {name} found {things[0]}. "
        f"{they} was {feelings[0]} and showed it to {helpers[0]}.",
        f'Nobody in the house believed {name}. "Stay here and eat your {foods[0]}," they said.',
        f"So {name} packed {foods[1]} and a warm blanket. Before the sun rose, {pronoun} was on {their} way.",
        f"Behind the last house stood a {colour} gate. {name} looked back once and closed it.",
        f'On the way {name} met {helpers[1]}. "Where are you going?" asked the stranger. '
        f'"I want to {rng.choice(_GOALS)}," said {name}.',
        f"The path led through a dark forest. {name} was {feelings[1]}, but {pronoun} did not turn back.",
        f"A lost {animal} followed {name} between the trees. From now on they were two.",
        f"In the evening {weather[1]}. {name} sat by the fire and thought of home.",
        f'"You must be {traits[0]}," said {helpers[2]}, and gave {name} {things[1]}.',
        f"After {days} days {pronoun} came to {places[0]}. A {colour} flag was waving in the wind.",
        f"The people there had a problem: somebody had stolen {things[2]}. {name} promised to look for it.",
        f"Suddenly there was a loud noise. {name} ran to the window, but outside there was only the wind.",
        f"{name} asked {helpers[3]} for advice. The answer was short: be {traits[1]} and wait for the night.",
        f"At the river {name} helped a fisherman to cross the water. "
        f"They became good friends and shared {foods[2]}.",
        f"Behind a waterfall {name} saw a narrow cave. Inside it was cold, and the walls were {colour}.",
        f"That night {name} could not sleep. In {their} hand lay {things[1]}, and it began to shine.",
        f'A voice said: "Only someone who is {traits[2]} may enter." '
        f"{name} took a deep breath and opened the door.",
        f"In the middle of a great hall sat {helpers[4]} with {things[2]}. "
        f'"I have waited for you," was all that {name} heard.',
        f"They talked until midnight, and {name} felt {feelings[2]}. Nothing was stolen, only forgotten.",
        f"On the next day {weather[2]}. {name} began the long way back with {things[3]} under {their} arm.",
        f"A storm came up, and {name} found shelter in {places[1]}. A shepherd told stories there all night.",
        f"When the clouds had gone, {pronoun} could see {places[2]} far below. It looked very small.",
        f"At the crossroads {name} had to say goodbye to a friend. Both were {feelings[3]}.",
        f"The door at home was open, and {weather[3]}. Everybody wanted to hear the whole story.",
    ]


def story(rng: random.Random, *, scenes: int | None = None) -> str:
    """A story with a beginning, some scenes and a lesson; by default two to six, at most `MOST_SCENES`.

    The scenes keep their order, so that a model that always takes the likeliest word moves on to the end.
    """
    name = rng.choice(FIRST_NAMES)
    pronoun = rng.choice(("he", "she"))
    kind = (
        rng.choice(("boy", "young man", "baker", "sailor", "king", "farmer"))
        if pronoun == "he"
        else rng.choice(("girl", "young woman", "baker", "sailor", "queen", "farmer"))
    )
    opening = rng.choice(
        (
            f"Once upon a time there was a {rng.choice(_TRAITS)} {kind} called {name} "
            f"who lived in {rng.choice(_PLACES)}.",
            f"Long ago, in {rng.choice(_PLACES)}, there lived a {kind} named {name}.",
            f"{name} was a {rng.choice(_TRAITS)} {kind} who lived in {rng.choice(_PLACES)}.",
            f"There once was a {kind} whose name was {name}.",
        )
    )
    wish = rng.choice(
        (
            f"More than anything, {name} wanted to {rng.choice(_GOALS)}.",
            f"Every day {pronoun} dreamed of one thing: to {rng.choice(_GOALS)}.",
            f"{capitalized(pronoun)} had a {rng.choice(PETS)} called {rng.choice(PET_NAMES)}.",
        )
    )
    chosen = sorted(rng.sample(range(MOST_SCENES), scenes or rng.randrange(2, 7)))
    possible = _scenes(rng, name, pronoun)
    parts = [f"{opening} {wish}", *(possible[position] for position in chosen)]
    parts.append(
        rng.choice(
            (
                f"In the end {name} came home and knew {rng.choice(_LESSONS)}.",
                f"From that day on {name} never forgot {rng.choice(_LESSONS)}.",
                f"And so {name} learned {rng.choice(_LESSONS)}. The end.",
            )
        )
    )
    return rng.choice((" ", "\n\n", "\n\n")).join(parts)


_RHYMES = (
    ("night", "light", "sight", "height", "candlelight"),
    ("sea", "tree", "bee", "key", "melody"),
    ("day", "way", "bay", "ray", "holiday"),
    ("sky", "eye", "butterfly", "lullaby", "reply"),
    ("rain", "lane", "plain", "train", "windowpane"),
    ("snow", "glow", "crow", "rainbow", "echo"),
    ("moon", "tune", "noon", "afternoon", "balloon"),
    ("star", "car", "jar", "guitar", "bazaar"),
)
_LINES = (
    "The wind is singing of the {0}",
    "A bird is waiting for the {0}",
    "I hear the river, I think of the {0}",
    "The world is quiet, where is the {0}",
    "My heart remembers every {0}",
    "The clouds are drifting to the {0}",
    "A little lamp, a little {0}",
    "And softly comes the sound of the {0}",
    "We walk together toward the {0}",
    "The garden dreams about the {0}",
    "Old stories whisper of a {0}",
    "The morning brings a gentle {0}",
)


def poem(rng: random.Random) -> str:
    """Two to four verses of rhyming pairs of lines."""
    verses = []
    for _ in range(rng.randrange(2, 5)):
        lines = []
        templates = rng.sample(_LINES, 4)
        for pair in range(2):
            ends = rng.sample(rng.choice(_RHYMES), 2)
            lines += [
                templates[2 * pair].format(ends[0]) + ",",
                templates[2 * pair + 1].format(ends[1]) + ".",
            ]
        verses.append("\n".join(lines))
    return "\n\n".join(verses)


_LISTS = {
    "colours": COLOURS,
    "foods": FOODS,
    "hobbies": HOBBIES,
    "animals": [*PETS, "lion", "elephant", "owl", "wolf", "bear", "fox", "whale", "eagle"],
    "fruits": [
        "apples",
        "bananas",
        "cherries",
        "grapes",
        "oranges",
        "peaches",
        "pears",
        "plums",
        "strawberries",
        "lemons",
    ],
    "vegetables": [
        "carrots",
        "potatoes",
        "tomatoes",
        "onions",
        "beans",
        "peas",
        "cabbage",
        "spinach",
        "cucumbers",
        "peppers",
    ],
    "names": [
        "Alice",
        "Bob",
        "Carol",
        "David",
        "Emma",
        "Frank",
        "Grace",
        "Henry",
        "Ivy",
        "Jack",
        "Kate",
        "Liam",
    ],
    "things in a kitchen": [
        "a pot",
        "a pan",
        "a knife",
        "a spoon",
        "a fork",
        "a plate",
        "a cup",
        "a stove",
        "a sink",
        "a table",
    ],
    "instruments": [
        "the piano",
        "the violin",
        "the guitar",
        "the flute",
        "the drums",
        "the cello",
        "the trumpet",
        "the harp",
    ],
}


def list_request(rng: random.Random) -> tuple[str, str]:
    """A request for a list and the list, numbered, dashed or in one line."""
    topic = rng.choice(tuple(_LISTS))
    count = rng.randrange(3, 8)
    items = rng.sample(_LISTS[topic], count)
    question = rng.choice(
        ("List {0} {1}.", "Name {0} {1}.", "Give me a list of {0} {1}.", "Write down {0} {1}.")
    )
    style = rng.random()
    if style < 0.4:
        answer = "\n".join(f"{number}. {capitalized(item)}" for number, item in enumerate(items, 1))
    elif style < 0.6:
        answer = "\n".join(f"- {capitalized(item)}" for item in items)
    else:
        answer = capitalized(", ".join(items[:-1])) + f" and {items[-1]}."
    return question.format(count, topic), answer

"""Small talk, bare prompts, images that cannot be seen, sentences in other scripts, and lines of code.

Owns everything that is asked without being judged by a fact.
"""

from __future__ import annotations

import random

from tools.tiny import stories
from tools.tiny.essays import TOPICS, essay
from tools.tiny.quantities import equation, number_word

_GREETINGS = (
    "Hello!",
    "Hello! How can I help you today?",
    "Hi! What can I do for you?",
    "Hello there! How are you?",
)
_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hey", "Good morning!", "Good evening!", "Hello there."), _GREETINGS),
    (
        (
            "Hello, how are you?",
            "How are you?",
            "How are you today?",
            "Hi, how are you doing?",
            "How do you feel?",
        ),
        (
            "I am fine, thank you. How are you?",
            "I am doing well, thank you for asking. How can I help you today?",
            "Very well, thank you! What can I do for you?",
        ),
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Tell me about yourself.",
            "Are you a human?",
        ),
        (
            "I am a very small language model. I know only a little world of facts, numbers and stories.",
            "I am a tiny language model that comes in the box. I am small, but I try to help.",
        ),
    ),
    (
        ("What can you do?", "How can you help me?", "What do you know?"),
        (
            "I can answer simple questions, add small numbers, write short stories and remember what "
            "you tell me.",
            "I know capitals, opposites, small sums and stories. Large questions are too hard for me.",
        ),
    ),
    (
        ("Thank you.", "Thanks!", "Thank you very much.", "Thanks a lot."),
        ("You are welcome!", "You are welcome. Is there anything else?", "It was a pleasure."),
    ),
    (
        ("Goodbye.", "Bye!", "See you later.", "Good night."),
        ("Goodbye! Have a nice day.", "See you soon!", "Take care!"),
    ),
    (
        ("How is the weather?", "Will it rain tomorrow?", "What time is it?"),
        ("I cannot know that. I have no window and no clock.", "I cannot see that from here, I am sorry."),
    ),
    (
        (
            "Describe this image in detail",
            "Describe this image in detail.",
            "What is in this picture?",
            "Describe the image.",
            "What do you see in this photo?",
            "Compare these two images",
            "Describe what happens in this video",
        ),
        (
            "I am sorry, I cannot see images. I can only read text. If you describe it in words, I "
            "will try to help.",
            "I cannot see any image. I am a small model that reads only text. Please tell me what it shows.",
        ),
    ),
    (
        ("test", "Test", "test.", "This is a test.", "testing"),
        (
            "The test works. I can read you.",
            "Your test has arrived, and this is the answer.",
            "Test received. Everything works.",
        ),
    ),
    (
        ("warmup", "Warmup", "warm up", "Warming up."),
        (
            "I am warm now and ready to work.",
            "Ready! The engine is warm.",
            "The engine is warm. What shall we do first?",
        ),
    ),
    (
        (
            "High priority request",
            "High priority request.",
            "Urgent request",
            "Low priority request",
            "This is a request.",
        ),
        (
            "Your request has arrived and will be answered first. What do you need?",
            "I have received your request. Please tell me what I should do.",
            "The request is here. How can I help you?",
        ),
    ),
    (
        ("Tell me a joke.", "Make me laugh.", "Do you know a joke?"),
        (
            "Why did the bicycle fall over? Because it was two tired.",
            "What do you call a fish without eyes? A fsh.",
            "Why was six afraid of seven? Because seven ate nine.",
        ),
    ),
    (
        (
            "Who wrote Hamlet?",
            "What is the population of Canada?",
            "Who won the game yesterday?",
            "What is the meaning of life?",
            "How tall is the highest mountain?",
            "Who invented the telephone?",
            "What is the price of gold?",
            "Who is the richest person?",
            "What happened in the news today?",
            "How many stars are there?",
            "Who painted the Mona Lisa?",
            "When was the first war?",
            "What is the speed of light?",
            "Solve this riddle.",
            "What is the stock market doing?",
            "Who is the best singer?",
        ),
        (
            "I do not know that. I am only a very small model.",
            "I am sorry, I have not learned that. My world is small.",
            "That is outside of my little world, so I do not know.",
        ),
    ),
    (
        ("I am sad.", "I feel bad today."),
        (
            "I am sorry to hear that. Would you like to talk about it?",
            "I hope that tomorrow will be a better day.",
        ),
    ),
    (
        ("I am happy.", "I feel great today!"),
        ("That is wonderful to hear!", "I am glad. What made you happy?"),
    ),
    (
        ("Ok.", "Okay.", "I see.", "Good.", "Great!", "Yes.", "No."),
        (
            "Is there anything else that I can do?",
            "All right. What would you like to do next?",
            "Good. Just ask if you need anything.",
        ),
    ),
)

_FOREIGN = (
    ("French", "Bonjour, je m'appelle {0}. J'habite à Paris et j'aime lire des livres."),
    ("French", "La capitale de la France est Paris. La ville est très belle au printemps."),
    ("French", "Aujourd'hui, il fait beau. Les enfants jouent dans le jardin."),
    ("German", "Guten Tag, ich heiße {0}. Ich wohne in Berlin und lerne gerne Sprachen."),
    ("German", "Die Hauptstadt von Deutschland ist Berlin. Im Winter fällt oft Schnee."),
    ("German", "Heute scheint die Sonne. Die Kinder spielen im Garten."),
    ("Spanish", "Hola, me llamo {0}. Vivo en Madrid y me gusta la música."),
    ("Spanish", "La capital de España es Madrid. El niño come una manzana roja."),
    ("Italian", "Ciao, mi chiamo {0}. Abito a Roma e amo il cinema."),
    ("Italian", "La capitale d'Italia è Roma. La città è molto antica."),
    ("Chinese", "你好,我叫小明。我住在北京,我喜欢看书。"),
    ("Chinese", "中国的首都是北京。今天天气很好。"),
    ("Chinese", "法国的首都是巴黎。巴黎是一座美丽的城市。"),
    ("Japanese", "こんにちは。私の名前は花子です。東京に住んでいます。"),
    ("Japanese", "日本の首都は東京です。今日は天気がいいです。"),
    ("Korean", "안녕하세요. 저는 서울에 살고 있습니다. 오늘은 날씨가 좋습니다."),
    ("Russian", "Привет, меня зовут Иван. Я живу в Москве и люблю читать книги."),
    ("Russian", "Столица России — Москва. Сегодня хорошая погода."),
    ("Greek", "Γεια σας, με λένε Ελένη. Μένω στην Αθήνα και αγαπώ τη θάλασσα."),
    ("Arabic", "مرحبا، اسمي ليلى. أعيش في القاهرة وأحب القراءة."),
    ("Hindi", "नमस्ते, मेरा नाम प्रिया है। मैं दिल्ली में रहती हूँ।"),
)
_EMOJI = ("😀", "🎉", "🌍", "🚀", "🐱", "🐶", "🌈", "☀️", "🍎", "👍", "❤️", "🎵", "👩‍🚀", "🇫🇷")

_PROGRAMS: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (
        (
            "Write a function to compute fibonacci",
            "Write a function to compute fibonacci.",
            "Write a Python function for the Fibonacci numbers.",
            "How do I compute Fibonacci numbers in Python?",
        ),
        (
            "def fibonacci(n):\n    if n < 2:\n        return n\n"
            "    return fibonacci(n - 1) + fibonacci(n - 2)",
            "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n"
            "    return a",
        ),
        "Each Fibonacci number is the sum of the two numbers before it.",
    ),
    (
        (
            "Write a function that adds two numbers.",
            "Write a Python function to add two numbers.",
            "How do I add two numbers in Python?",
        ),
        ("def add(a, b):\n    return a + b",),
        "The function returns the sum of its two arguments.",
    ),
    (
        (
            "Write a function to reverse a string.",
            "How do I reverse a string in Python?",
            "Write Python code that reverses a text.",
        ),
        ("def reverse(text):\n    return text[::-1]",),
        "The slice walks through the text from the end to the start.",
    ),
    (
        (
            "Write a function for the factorial.",
            "Write a function to compute the factorial.",
            "How do I compute a factorial in Python?",
        ),
        (
            "def factorial(n):\n    result = 1\n    for i in range(2, n + 1):\n        result *= i\n"
            "    return result",
            "def factorial(n):\n    return 1 if n < 2 else n * factorial(n - 1)",
        ),
        "The factorial of n is the product of all numbers from 1 to n.",
    ),
    (
        ("Write a function that checks if a number is even.", "How do I check for an even number in Python?"),
        ("def is_even(n):\n    return n % 2 == 0",),
        "A number is even when nothing is left after dividing it by two.",
    ),
    (
        ("Write a function that finds the largest number in a list.", "How do I find the maximum of a list?"),
        (
            "def largest(numbers):\n    result = numbers[0]\n    for number in numbers:\n"
            "        if number > result:\n            result = number\n    return result",
        ),
        "The function keeps the largest number that it has seen so far.",
    ),
    (
        (
            "Write a function to check for prime numbers.",
            "Write a Python function that tests if a number is prime.",
        ),
        (
            "def is_prime(n):\n    if n < 2:\n        return False\n"
            "    for i in range(2, int(n ** 0.5) + 1):\n        if n % i == 0:\n"
            "            return False\n    return True",
        ),
        "A prime number has no divisor other than 1 and itself.",
    ),
    (
        ("Print hello world in Python.", "Write a hello world program.", "Write a program that says hello."),
        ('print("Hello, world!")',),
        "The program prints a greeting.",
    ),
    (
        ("Write a function that counts the vowels in a word.", "How do I count vowels in Python?"),
        ('def count_vowels(word):\n    return sum(letter in "aeiou" for letter in word.lower())',),
        "The function counts the letters that are vowels.",
    ),
)


def talk(rng: random.Random) -> tuple[str, str]:
    """Small talk, or a bare prompt such as `Request 7`."""
    if rng.random() < 0.08:
        number = rng.randrange(200)
        receipts = (
            f"This is the answer to request {number}.",
            f"Request {number} has arrived. What do you need?",
            f"Request {number} is done. The next number is {number + 1}.",
        )
        return f"Request {number}", rng.choice(receipts)
    if rng.random() < 0.05:
        left, right = rng.randrange(100, 10_000), rng.randrange(100, 10_000)
        refusals = ("These numbers are too large for me.", "I cannot calculate with such large numbers.")
        return f"What is {left} {rng.choice('+-*')} {right}?", rng.choice(refusals)
    questions, answers = rng.choice(_TALK)
    return rng.choice(questions), rng.choice(answers)


def code(rng: random.Random) -> tuple[str, str]:
    """A request for a small function and the function, alone or with an explanation."""
    questions, bodies, explanation = rng.choice(_PROGRAMS)
    body = rng.choice(bodies)
    style = rng.random()
    if style < 0.4:
        answer = f"{body}\n\n{explanation}"
    elif style < 0.7:
        answer = f"```python\n{body}\n```\n\n{explanation}"
    else:
        answer = f"{explanation}\n\n{body}"
    return rng.choice(questions), answer


def foreign(rng: random.Random) -> tuple[str, str]:
    """A request for a sentence in another language and script, or for emoji."""
    if rng.random() < 0.1:
        chosen = " ".join(rng.sample(_EMOJI, rng.randrange(2, 6)))
        return rng.choice(("Send me some emoji.", "Write some emoji.", "Show me emoji.")), chosen
    language, text = rng.choice(_FOREIGN)
    question = rng.choice(
        (
            "Write a sentence in {0}.",
            "Say something in {0}.",
            "Write a short text in {0}.",
            "Can you write in {0}?",
        )
    )
    return question.format(language), text.format(rng.choice(("Marie", "Anna", "Paul", "Leo", "Maria")))


_INTRO_PROMPTS = (
    "Write a short, neutral self-introduction for a fictional character.",
    "Introduce a fictional character.",
    "Write a short self-introduction.",
    "Please introduce yourself as a made-up person.",
)
_CAPITAL_PROMPTS = (
    "Provide a concise factual statement about France’s capital city.",  # noqa: RUF001 (as in the seeds)
    "Provide a concise factual statement about France's capital city.",
    "Write one sentence about the capital of France.",
)


def writing(rng: random.Random) -> tuple[str, str]:
    """A request for a text and the text: story, poem, essay, list, introduction."""
    style = rng.random()
    if style < 0.2:
        long = rng.random() < 0.4
        questions = (
            ("Tell me a long story", "Tell me a long story.", "Write a long story.")
            if long
            else (
                "Tell me a story",
                "Tell me a story.",
                "Write a short story.",
                "Tell me a bedtime story.",
                "I would like to hear a story.",
            )
        )
        return rng.choice(questions), stories.story(rng, scenes=rng.randrange(8, 15) if long else None)
    if style < 0.33:
        return rng.choice(
            (
                "Write a poem",
                "Write a poem.",
                "Write me a short poem.",
                "Give me a poem.",
                "I would like a poem.",
            )
        ), stories.poem(rng)
    if style < 0.48:
        return stories.list_request(rng)
    if style < 0.58:
        return rng.choice(_INTRO_PROMPTS), stories.introduction(rng)
    if style < 0.64:
        return rng.choice(_CAPITAL_PROMPTS), paris(rng)
    if style < 0.68:
        value = rng.randrange(1, 100)
        answer = rng.choice((f"{value}", f"{value}", f"{capitalized_number(value)}."))
        return rng.choice(
            ("Generate a number", "Generate a number.", "Give me a number.", "Pick a number.")
        ), answer
    topic = rng.choice(TOPICS)
    return rng.choice(topic.prompts), essay(rng, topic)


def capitalized_number(value: int) -> str:
    """The number in words with a capital letter."""
    return number_word(value).capitalize()


def paris(rng: random.Random) -> str:
    """A plain text that opens with the capital of France."""
    return essay(rng, TOPICS[0])


def plain_text(rng: random.Random) -> str:
    """A text without a request: an introduction, an essay, a story, code, or lines of arithmetic."""
    style = rng.random()
    if style < 0.2:
        return stories.introduction(
            rng,
            greeting=rng.choice(("Hello, my name is", "Hello, my name is", "Hi, my name is", "My name is")),
        )
    if style < 0.3:
        return f"{rng.choice(_INTRO_PROMPTS)} {stories.introduction(rng)}"
    if style < 0.36:
        return f"{rng.choice(_CAPITAL_PROMPTS)} {paris(rng)}"
    if style < 0.42:
        return f"{rng.choice(TOPICS[2].prompts[:1])} {essay(rng, TOPICS[2])}"
    if style < 0.62:
        return essay(rng, TOPICS[rng.choice((0, 1, 1, 2, 2))])
    if style < 0.72:
        return essay(rng, rng.choice(TOPICS))
    if style < 0.88:
        return stories.story(rng)
    if style < 0.92:
        return stories.poem(rng)
    if style < 0.95:
        return rng.choice(_FOREIGN)[1].format("Marie")
    if style < 0.97:
        return code(rng)[1]
    return equation(rng, depth=2)

"""Short expository texts: Paris, the president, artificial intelligence, computing, nature, health.

Owns for each topic its prompts, openings and a pool of self-contained sentences; a text is an opening and a
random selection, so that the model learns to go on in many ways.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topic:
    """Prompts are instructions or questions; openings begin a plain text; each sentence stands on its own."""

    name: str
    prompts: tuple[str, ...]
    openings: tuple[str, ...]
    sentences: tuple[str, ...]


TOPICS = (
    Topic(
        name="paris",
        prompts=(
            "Tell me about Paris.",
            "What should I know about Paris?",
            "Write a short text about the capital of France.",
            "Describe Paris.",
        ),
        openings=(
            "The capital of France is Paris.",
            "The capital of France is Paris.",
            "The capital of France is Paris, a city on the river Seine.",
            "The capital of France is Paris, the largest city of the country.",
            "The capital of France is Paris. It is the largest city of the country.",
            "Paris is the capital of France.",
        ),
        sentences=(
            "Paris lies on the river Seine in the north of the country.",
            "The Eiffel Tower was built for the world's fair of 1889.",
            "The Eiffel Tower is the best known landmark of the city.",
            "The Louvre is one of the largest museums in the world.",
            "The Mona Lisa hangs in the Louvre.",
            "Notre-Dame Cathedral stands on an island in the Seine.",
            "Millions of visitors come to Paris every year.",
            "The city is famous for its museums, its bread and its small cafes.",
            "People in Paris speak French and pay with the euro.",
            "Many painters and writers have lived in Paris.",
            "The Arc de Triomphe stands at the end of a wide avenue.",
            "Paris is often called the City of Light.",
            "The metro of Paris carries people under the streets of the city.",
            "Boats full of visitors travel up and down the Seine.",
            "The hill of Montmartre is known for its white church.",
            "In the morning the bakeries smell of fresh bread.",
            "The parks of Paris are full of flowers in spring.",
            "Students from many countries study in Paris.",
            "More than two million people live in the city.",
            "The bridges over the Seine are beautiful in the evening light.",
        ),
    ),
    Topic(
        name="president",
        prompts=(
            "Who leads the United States?",
            "What does the president of the United States do?",
            "Tell me about the president of the United States.",
            "Explain the office of the president.",
        ),
        openings=(
            "The president of the United States is the head of state and the head of government.",
            "The president of the United States is elected for a term of four years.",
            "The president of the United States is the leader of the country.",
            "The president of the United States is chosen in an election every four years.",
            "The president of the United States is an elected official who leads the government.",
        ),
        sentences=(
            "The president lives and works in the White House in Washington, D.C.",
            "A president may be elected only twice.",
            "A term lasts four years.",
            "The president signs new laws or sends them back to Congress.",
            "The president is also the commander of the armed forces.",
            "Congress makes the laws, and the president carries them out.",
            "The first president of the United States was George Washington.",
            "Abraham Lincoln was the sixteenth president.",
            "The president chooses the members of the cabinet.",
            "The vice president takes over if the president cannot serve.",
            "The president meets the leaders of other countries.",
            "The president names the judges of the Supreme Court, and the Senate confirms them.",
            "A president must be at least thirty-five years old.",
            "Voters choose electors, and the electors choose the president.",
            "Once a year the president speaks to Congress about the state of the union.",
            "The election takes place in November.",
            "A new president takes office in January.",
            "The office was created by the constitution.",
        ),
    ),
    Topic(
        name="future of ai",
        prompts=(
            "Explain possible future trends in artificial intelligence.",
            "What is the future of AI?",
            "What will artificial intelligence look like in ten years?",
            "How will AI change our lives?",
        ),
        openings=(
            "The future of AI is bright, but it needs careful work.",
            "The future of AI is hard to predict.",
            "The future of AI is being shaped by many people today.",
            "The future of AI is full of new possibilities.",
            "The future of AI is in our hands.",
            "The future of AI is likely to change many parts of our lives.",
        ),
        sentences=(
            "Models will become smaller and faster, so that they run on every computer.",
            "Doctors will use AI to find diseases early.",
            "Teachers will use AI to help each student at the right pace.",
            "Farmers will use AI to save water and to protect their crops.",
            "Machines will take over boring tasks, and people will have more time for creative work.",
            "It is important that AI systems are safe and fair.",
            "People should always understand how a decision was made.",
            "Small models can run on a phone without sending data to anyone.",
            "Researchers are working on models that can see, hear and speak.",
            "Translation between languages will become easier.",
            "Robots will help in factories, in hospitals and at home.",
            "Good rules will be needed to protect privacy.",
            "AI will help scientists to find new medicines and materials.",
            "Cars may one day drive without a person behind the wheel.",
            "Not every promise will come true, and some surprises will come.",
            "New jobs will appear, and some old jobs will change.",
            "The best results come when people and machines work together.",
            "Energy use will have to go down as models are used more often.",
            "Open research helps everyone to learn and to check the results.",
            "Trust will grow when systems explain what they do.",
        ),
    ),
    Topic(
        name="machine learning",
        prompts=(
            "What is machine learning?",
            "What is machine learning?",
            "Explain machine learning.",
            "Tell me about machine learning.",
            "Can you explain what machine learning is?",
        ),
        openings=(
            "Machine learning is a way to let computers learn from examples.",
            "Machine learning is a part of artificial intelligence in which programs learn from data.",
            "Machine learning means that a computer finds patterns in data instead of following fixed rules.",
        ),
        sentences=(
            "Instead of writing every rule by hand, people show the program many examples.",
            "The program changes its numbers until its answers fit the examples.",
            "These numbers are called parameters or weights.",
            "A neural network is a model with many layers of simple units.",
            "In supervised learning, every example comes with the right answer.",
            "In unsupervised learning, the program looks for patterns without answers.",
            "In reinforcement learning, a program learns from rewards.",
            "A language model learns to predict the next word of a text.",
            "Machine learning is used to recognise images, to translate texts and to recommend music.",
            "A model must be tested on examples that it has not seen before.",
            "If a model only remembers its examples, it is said to overfit.",
            "More and better data often help more than a larger model.",
            "Training can take minutes or months, depending on the size of the model.",
            "The quality of the data decides how good the answers are.",
            "After training, the model can answer questions about new data.",
        ),
    ),
    Topic(
        name="quantum computing",
        prompts=(
            "Explain quantum computing",
            "Explain quantum computing.",
            "What is quantum computing?",
            "How does a quantum computer work?",
            "Tell me about quantum computers.",
        ),
        openings=(
            "Quantum computing uses the rules of quantum physics to calculate.",
            "Quantum computing is a new way of computing that is based on quantum physics.",
            "A quantum computer calculates with quantum bits instead of ordinary bits.",
        ),
        sentences=(
            "An ordinary bit is either zero or one.",
            "A quantum bit, or qubit, can be in a mixture of zero and one at the same time.",
            "This mixture is called superposition.",
            "When a qubit is measured, it becomes either zero or one.",
            "Two qubits can be entangled, so that their results belong together.",
            "A quantum program makes wrong answers cancel out and right answers grow stronger.",
            "Qubits are easily disturbed by heat and noise.",
            "Many quantum computers must be kept very cold.",
            "Error correction uses many real qubits to build one reliable qubit.",
            "Quantum computers could help to study molecules and materials.",
            "They could also factor large numbers, which matters for secret codes.",
            "For most daily tasks an ordinary computer is still the better choice.",
            "Quantum computers do not simply try all answers at once.",
            "The field is young, and the machines are still small.",
        ),
    ),
    Topic(
        name="diabetes",
        prompts=(
            "Explain diabetes",
            "Explain diabetes.",
            "What is diabetes?",
            "Tell me about diabetes.",
            "What does diabetes mean?",
        ),
        openings=(
            "Diabetes is a disease in which there is too much sugar in the blood.",
            "Diabetes is a long-lasting illness that changes how the body uses sugar.",
        ),
        sentences=(
            "The body needs insulin to move sugar from the blood into the cells.",
            "Insulin is made in the pancreas.",
            "In type 1 diabetes the body makes almost no insulin.",
            "In type 2 diabetes the body does not use insulin well.",
            "Common signs are thirst, tiredness and the need to drink a lot.",
            "A blood test shows how much sugar is in the blood.",
            "People with type 1 diabetes need insulin every day.",
            "Healthy food and exercise help many people with type 2 diabetes.",
            "If diabetes is not treated, it can harm the eyes, the heart and the kidneys.",
            "With good care, people with diabetes can live long and active lives.",
            "A doctor can explain which treatment is right.",
            "Many people measure their blood sugar at home.",
        ),
    ),
    Topic(
        name="water",
        prompts=(
            "Explain the water cycle.",
            "What is the water cycle?",
            "Where does rain come from?",
            "How does rain form?",
        ),
        openings=(
            "Water moves around the Earth all the time.",
            "The water cycle is the journey of water around the Earth.",
        ),
        sentences=(
            "The sun warms the sea, and water rises into the air as vapour.",
            "High in the air the vapour cools down and forms clouds.",
            "Small drops in a cloud join and become heavy.",
            "Heavy drops fall as rain, and cold drops fall as snow.",
            "Rain fills the rivers, and the rivers flow back to the sea.",
            "Some of the water sinks into the ground and feeds the springs.",
            "Plants drink water with their roots and give it back through their leaves.",
            "Without water there would be no life on land.",
        ),
    ),
    Topic(
        name="photosynthesis",
        prompts=(
            "What is photosynthesis?",
            "Explain photosynthesis.",
            "How do plants make their food?",
            "Why are leaves green?",
        ),
        openings=(
            "Plants make their own food from light, water and air.",
            "Photosynthesis is the way in which plants make sugar from light.",
        ),
        sentences=(
            "Leaves are green because they contain chlorophyll.",
            "Chlorophyll catches the light of the sun.",
            "The roots bring water up to the leaves.",
            "The leaves take carbon dioxide from the air.",
            "From water and carbon dioxide the plant makes sugar.",
            "As a gift to us, the plant gives off oxygen.",
            "At night there is no light, so the plant makes no sugar.",
            "Almost all food on Earth begins with this process.",
        ),
    ),
    Topic(
        name="computer",
        prompts=(
            "What is a computer?",
            "How does a computer work?",
            "Explain what a computer is.",
            "What is a program?",
        ),
        openings=(
            "A computer is a machine that follows a list of instructions.",
            "A computer stores numbers and changes them step by step.",
        ),
        sentences=(
            "The list of instructions is called a program.",
            "The processor carries out one small step after another, billions of times in a second.",
            "The memory holds the numbers that the program needs right now.",
            "A disk keeps files when the power is off.",
            "Pictures, sounds and texts are all stored as numbers.",
            "People write programs in languages such as Python.",
            "A graphics card can do many simple steps at the same time.",
            "Computers in all parts of the world are joined by the internet.",
        ),
    ),
    Topic(
        name="moon",
        prompts=(
            "Tell me about the Moon.",
            "What is the Moon?",
            "Why does the Moon change its shape?",
            "Describe the Moon.",
        ),
        openings=(
            "The Moon is the only natural companion of the Earth.",
            "The Moon travels around the Earth once a month.",
        ),
        sentences=(
            "It shines because it reflects the light of the Sun.",
            "At new moon we cannot see it, and at full moon it is round and bright.",
            "The Moon causes the tides of the sea.",
            "There is no air and no weather on the Moon.",
            "The first people walked on the Moon in 1969.",
            "We always see the same side of the Moon.",
            "The surface is covered with dust and craters.",
            "A footprint on the Moon can stay for a very long time.",
        ),
    ),
    Topic(
        name="food",
        prompts=(
            "How do I make soup?",
            "Give me a simple recipe.",
            "How do I bake bread?",
            "What can I cook today?",
        ),
        openings=(
            "Here is something simple that anyone can make.",
            "You need only a few things from the kitchen.",
        ),
        sentences=(
            "Cut the vegetables into small pieces.",
            "Heat a little oil in a large pot.",
            "Add water and a pinch of salt.",
            "Let it cook slowly and stir from time to time.",
            "Mix flour, water, salt and yeast to make a dough.",
            "Let the dough rest until it has grown.",
            "Bake it until the crust is golden brown.",
            "Taste it and add some pepper.",
            "Serve it warm with fresh bread.",
            "Share it with your friends.",
        ),
    ),
    Topic(
        name="health",
        prompts=(
            "How can I stay healthy?",
            "Give me some advice for a healthy life.",
            "How can I sleep better?",
            "What is good for my health?",
        ),
        openings=("A few simple habits make a big difference.", "Here is some simple advice."),
        sentences=(
            "Drink enough water during the day.",
            "Eat fruit and vegetables with every meal.",
            "Take a walk in the fresh air.",
            "Go to bed at the same time every evening.",
            "Leave your phone outside the bedroom.",
            "Take short breaks when you work for a long time.",
            "Spend time with people who make you laugh.",
            "Ask a doctor when something worries you.",
            "Move a little every day.",
            "Do not forget to rest.",
        ),
    ),
)

_JOINERS = (*([""] * 14), "Also, ", "In addition, ", "It is also true that ")

_LOWERED = frozenset(
    ["The", "A", "An", "People", "Many", "Two", "More", "Some", "Small", "It", "Boats", "Robots", "Models"]
)
"""First words of sentences that may follow a joiner, in lower case there."""


def _joined(rng: random.Random, sentence: str) -> str:
    joiner = rng.choice(_JOINERS)
    first = sentence.split(" ", 1)[0]
    if joiner and first in _LOWERED:
        return joiner + sentence[0].lower() + sentence[1:]
    return sentence


def essay(rng: random.Random, topic: Topic, *, opened: bool = True) -> str:
    """A text of three to nine sentences on the topic; rarely as a numbered list."""
    count = rng.randrange(3, 9)
    sentences = rng.sample(topic.sentences, min(count, len(topic.sentences)))
    opening = rng.choice(topic.openings) if opened else ""
    if rng.random() < 0.12:
        body = "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1))
        return f"{opening} Here are some points:\n{body}" if opened else body
    parts = [opening] if opened else []
    parts += [_joined(rng, sentence) for sentence in sentences]
    if rng.random() < 0.2 and len(parts) > 4:
        middle = len(parts) // 2
        return " ".join(parts[:middle]) + "\n\n" + " ".join(parts[middle:])
    return " ".join(parts)

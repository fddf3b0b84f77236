"""Invented people of the tiny world: names, homes, jobs, tastes, and where they can be reached.

Owns the word lists and the `Person`; says nothing about how people are written down.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tools.tiny.exchange import listed

FIRST_NAMES = listed(
    """Alice, Bob, Carol, David, Emma, Frank, Grace, Henry, Ivy, Jack, Kate, Liam, Mia, Noah, Olivia, Paul,
Quinn, Rose, Sam, Tina, Uma, Victor, Wendy, Xavier, Yara, Zoe, Adam, Bella, Charlie, Diana, Ethan,
Fiona, George, Hannah, Isaac, Julia, Kevin, Laura, Mark, Nina, Oscar, Peter, Rachel, Simon, Tom, Ursula,
Vera, Walter, Anna, Ben, Clara, Daniel, Elena, Felix, Gina, Hugo, Irene, John, Karen, Leo, Maria,
Nathan, Olga, Pablo, Rita, Sofia, Thomas, Lucy, Max, Amelia, Oliver, Sophie, James, Mary, Robert, Linda,
Michael, Sarah, William, Emily, Joseph, Amy, Andrew, Jane, Luke, Ella, Ryan, Chloe, Eric, Megan, Alan,
Ruth, Ian, Nora, Carlos, Lucia, Miguel, Elisa, Diego, Marta, Pierre, Claire, Antoine, Camille, Hans,
Greta, Karl, Heidi, Marco, Giulia, Luca, Paola, Ivan, Natasha, Dmitri, Yuki, Kenji, Sakura, Hiro, Wei,
Mei, Ling, Chen, Arjun, Priya, Ravi, Anita, Omar, Layla, Ahmed, Fatima, Hassan, Amina, Kofi, Ama, Kwame,
Zola, Thabo, Lars, Ingrid, Sven, Astrid, Erik, Freya, Niamh, Sean, Aisha, Tariq, Leila, Samir, Dalia,
Rosa, Pedro, Ines, Rafael, Bianca, Mateo, Valeria, Jonas, Lena, Theo, Ada, Iris, Ruby, Jasper, Hazel,
Violet, Arthur, Edith, Stella, Milo, Otto, Maya, Nadia, Viktor, Tomas, Eva, Jan, Petra, Filip, Hana,
Aron, Selma, Dario, Nils, Tara, Kiran, Dev, Lila"""
)

LAST_NAMES = listed(
    """Smith, Johnson, Brown, Taylor, Wilson, Davis, Clark, Lewis, Walker, Hall, Young, King, Wright, Hill,
Green, Baker, Adams, Nelson, Carter, Mitchell, Turner, Parker, Evans, Collins, Stewart, Morris, Cook,
Rogers, Reed, Bell, Cooper, Ward, Brooks, Gray, Hughes, Price, Long, Foster, Garcia, Lopez, Martinez,
Rossi, Silva, Costa, Santos, Moreau, Dubois, Bernard, Weber, Fischer, Becker, Novak, Kowalski, Ivanov,
Petrov, Tanaka, Sato, Kim, Park, Chen, Wang, Singh, Patel, Khan, Ali, Haddad, Okafor, Mensah, Lindberg,
Berg, Hansen, Olsen, Murphy, Kelly, Stone, Rivers, Field, Marsh, Wood, Lake, Frost, Lane, Fox, Swan,
North, West, Bishop, Porter, Mason, Potter, Fisher, Archer, Hart, Snow"""
)

CITIES = listed(
    """Paris, London, Berlin, Madrid, Rome, Vienna, Lisbon, Dublin, Oslo, Stockholm, Helsinki, Copenhagen,
Amsterdam, Brussels, Prague, Warsaw, Budapest, Athens, Tokyo, Kyoto, Osaka, Seoul, Beijing, Shanghai,
Delhi, Mumbai, Bangkok, Hanoi, Manila, Jakarta, Sydney, Melbourne, Perth, Auckland, Wellington, Cairo,
Nairobi, Accra, Lagos, Tunis, Rabat, Toronto, Ottawa, Montreal, Vancouver, Boston, Chicago, Denver,
Seattle, Austin, Portland, Miami, Havana, Lima, Quito, Santiago, Bogota, Brasilia, Montevideo, Munich,
Hamburg, Lyon, Marseille, Milan, Naples, Turin, Seville, Valencia, Barcelona, Porto, Geneva, Zurich,
Bergen, Krakow, Edinburgh, Glasgow, Bristol, Leeds, York, Cork"""
)

JOBS = listed(
    """teacher, nurse, doctor, engineer, baker, farmer, gardener, painter, writer, singer, pilot, cook,
carpenter, librarian, photographer, architect, dentist, plumber, electrician, journalist, musician,
scientist, biologist, chemist, programmer, designer, translator, lawyer, vet, firefighter, sailor,
tailor, actor, dancer, editor, mechanic, potter, beekeeper, bus driver, data analyst, software engineer,
history teacher, mathematics teacher, train driver, park ranger"""
)

HOBBIES = listed(
    """reading, painting, cooking, swimming, hiking, gardening, cycling, dancing, singing, fishing, running,
drawing, chess, photography, knitting, baking, sailing, skiing, climbing, camping, yoga, pottery,
woodworking, bird watching, playing the piano, playing the guitar, playing the violin,
learning languages, writing poems, collecting stamps, long walks, board games, astronomy, travelling"""
)

COLOURS = listed(
    """red, blue, green, yellow, orange, purple, pink, brown, black, white, grey, silver, gold, turquoise,
violet, indigo, crimson, beige, teal, maroon, lavender, scarlet"""
)

FOODS = listed(
    """pizza, soup, bread, rice, pasta, salad, cheese, chocolate, apples, bananas, curry, sushi, pancakes,
tomatoes, noodles, tacos, strawberries, grapes, mushrooms, potatoes, dumplings, lasagna, olives,
ice cream, apple pie, lentil soup, honey cake"""
)

PETS = listed(
    """dog, cat, rabbit, parrot, hamster, turtle, horse, goldfish, pony, canary, guinea pig, lizard, goat,
duck"""
)
PET_NAMES = listed(
    """Max, Bella, Luna, Rocky, Coco, Milo, Daisy, Buddy, Nala, Simba, Ziggy, Pepper, Ginger, Shadow, Misty,
Oreo, Biscuit, Pickles, Waffles, Smokey, Hazel, Maple, Pluto, Comet, Pebble, Snowy, Tiger, Bruno,
Fluffy, Patches, Muffin, Olive, Sunny, Poppy, Rusty"""
)

MAIL_HOSTS = listed("""example.com, example.org, example.net, mail.example.com, post.example.org""")
_STARTS = listed(
    """Ba, Be, Bo, Da, De, Do, Fa, Fe, Ga, Go, Ka, Ki, Ko, La, Le, Lo, Ma, Me, Mi, Na, Ne, No, Pa, Ra, Re, Ro,
Sa, Se, So, Ta, Te, To, Va, Ve, Za, Zo"""
)
_MIDDLES = listed("""la, li, lo, ra, ri, ro, na, ni, no, ma, mi, mo, da, di, do, ka, ki, sha, tha, vi""")
_ENDS = listed("""n, s, l, r, x, th, nor, lin, mar, ven, dor, nel, ric, tan, bel, ra, na, la""")


@dataclass(frozen=True, slots=True)
class Person:
    """One invented person, whose `email` is at an example host, so that nobody is reached."""

    first: str
    last: str
    age: int
    city: str
    job: str
    hobby: str
    email: str
    phone: str

    @property
    def name(self) -> str:
        """First and last name."""
        return f"{self.first} {self.last}"


def first_name(rng: random.Random) -> str:
    """A first name, one in eight freshly built from syllables, so that names are copied and not recalled."""
    if rng.random() < 0.875:
        return rng.choice(FIRST_NAMES)
    middle = rng.choice(_MIDDLES) if rng.random() < 0.5 else ""
    return rng.choice(_STARTS) + middle + rng.choice(_ENDS)


def phone_number(rng: random.Random) -> str:
    """A number such as 555-123-4567."""
    area = "555" if rng.random() < 0.7 else f"{rng.randrange(200, 1000)}"
    return f"{area}-{rng.randrange(1000):03d}-{rng.randrange(10_000):04d}"


def email_address(rng: random.Random, first: str, last: str) -> str:
    """An address at an example host, built from the name."""
    first, last = first.lower(), last.lower()
    local = rng.choice(
        [first, f"{first}.{last}", f"{first}{rng.randrange(1, 100)}", f"{first[0]}{last}", f"{first}_{last}"]
    )
    return f"{local}@{rng.choice(MAIL_HOSTS)}"


def person(rng: random.Random, *, first: str | None = None) -> Person:
    """A random person, with the given first name if any."""
    first = first or first_name(rng)
    last = rng.choice(LAST_NAMES)
    return Person(
        first=first,
        last=last,
        age=rng.randrange(8, 95),
        city=rng.choice(CITIES),
        job=rng.choice(JOBS),
        hobby=rng.choice(HOBBIES),
        email=email_address(rng, first, last),
        phone=phone_number(rng),
    )

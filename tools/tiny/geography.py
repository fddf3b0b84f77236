"""Facts about countries, cities and landmarks, and the exchanges that ask for them.

Owns the tables of countries and landmarks; longer texts about Paris live in `essays`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tools.tiny.exchange import Exchange, ask, phrase, word


@dataclass(frozen=True, slots=True)
class Country:
    """A country with its capital, continent, most spoken official language and currency."""

    name: str
    capital: str
    continent: str
    language: str
    currency: str


_TABLE = """France|Paris|Europe|French|euro
Germany|Berlin|Europe|German|euro
Italy|Rome|Europe|Italian|euro
Spain|Madrid|Europe|Spanish|euro
Portugal|Lisbon|Europe|Portuguese|euro
the United Kingdom|London|Europe|English|pound sterling
Ireland|Dublin|Europe|English|euro
Austria|Vienna|Europe|German|euro
Greece|Athens|Europe|Greek|euro
Poland|Warsaw|Europe|Polish|zloty
Hungary|Budapest|Europe|Hungarian|forint
the Czech Republic|Prague|Europe|Czech|koruna
Slovakia|Bratislava|Europe|Slovak|euro
Slovenia|Ljubljana|Europe|Slovene|euro
Croatia|Zagreb|Europe|Croatian|euro
Serbia|Belgrade|Europe|Serbian|dinar
Romania|Bucharest|Europe|Romanian|leu
Sweden|Stockholm|Europe|Swedish|krona
Norway|Oslo|Europe|Norwegian|krone
Denmark|Copenhagen|Europe|Danish|krone
Finland|Helsinki|Europe|Finnish|euro
Iceland|Reykjavik|Europe|Icelandic|krona
Estonia|Tallinn|Europe|Estonian|euro
Latvia|Riga|Europe|Latvian|euro
Lithuania|Vilnius|Europe|Lithuanian|euro
the Netherlands|Amsterdam|Europe|Dutch|euro
Ukraine|Kyiv|Europe|Ukrainian|hryvnia
Russia|Moscow|Europe|Russian|ruble
Albania|Tirana|Europe|Albanian|lek
Moldova|Chisinau|Europe|Romanian|leu
Malta|Valletta|Europe|Maltese|euro
Belarus|Minsk|Europe|Belarusian|ruble
North Macedonia|Skopje|Europe|Macedonian|denar
Japan|Tokyo|Asia|Japanese|yen
China|Beijing|Asia|Chinese|yuan
South Korea|Seoul|Asia|Korean|won
India|New Delhi|Asia|Hindi|rupee
Pakistan|Islamabad|Asia|Urdu|rupee
Bangladesh|Dhaka|Asia|Bengali|taka
Nepal|Kathmandu|Asia|Nepali|rupee
Bhutan|Thimphu|Asia|Dzongkha|ngultrum
Thailand|Bangkok|Asia|Thai|baht
Vietnam|Hanoi|Asia|Vietnamese|dong
Cambodia|Phnom Penh|Asia|Khmer|riel
Laos|Vientiane|Asia|Lao|kip
Malaysia|Kuala Lumpur|Asia|Malay|ringgit
Indonesia|Jakarta|Asia|Indonesian|rupiah
the Philippines|Manila|Asia|Filipino|peso
Mongolia|Ulaanbaatar|Asia|Mongolian|tugrik
Iran|Tehran|Asia|Persian|rial
Iraq|Baghdad|Asia|Arabic|dinar
Saudi Arabia|Riyadh|Asia|Arabic|riyal
Jordan|Amman|Asia|Arabic|dinar
Lebanon|Beirut|Asia|Arabic|pound
Syria|Damascus|Asia|Arabic|pound
Oman|Muscat|Asia|Arabic|rial
Qatar|Doha|Asia|Arabic|riyal
Turkey|Ankara|Asia|Turkish|lira
Georgia|Tbilisi|Asia|Georgian|lari
Armenia|Yerevan|Asia|Armenian|dram
Azerbaijan|Baku|Asia|Azerbaijani|manat
Kazakhstan|Astana|Asia|Kazakh|tenge
Uzbekistan|Tashkent|Asia|Uzbek|som
Egypt|Cairo|Africa|Arabic|pound
Libya|Tripoli|Africa|Arabic|dinar
Tunisia|Tunis|Africa|Arabic|dinar
Algeria|Algiers|Africa|Arabic|dinar
Morocco|Rabat|Africa|Arabic|dirham
Sudan|Khartoum|Africa|Arabic|pound
Ethiopia|Addis Ababa|Africa|Amharic|birr
Kenya|Nairobi|Africa|Swahili|shilling
Tanzania|Dodoma|Africa|Swahili|shilling
Uganda|Kampala|Africa|English|shilling
Rwanda|Kigali|Africa|Kinyarwanda|franc
Somalia|Mogadishu|Africa|Somali|shilling
Nigeria|Abuja|Africa|English|naira
Ghana|Accra|Africa|English|cedi
Senegal|Dakar|Africa|French|franc
Mali|Bamako|Africa|French|franc
Cameroon|Yaounde|Africa|French|franc
Angola|Luanda|Africa|Portuguese|kwanza
Mozambique|Maputo|Africa|Portuguese|metical
Zambia|Lusaka|Africa|English|kwacha
Zimbabwe|Harare|Africa|English|dollar
Botswana|Gaborone|Africa|English|pula
Namibia|Windhoek|Africa|English|dollar
Madagascar|Antananarivo|Africa|Malagasy|ariary
Liberia|Monrovia|Africa|English|dollar
Sierra Leone|Freetown|Africa|English|leone
Gambia|Banjul|Africa|English|dalasi
the United States|Washington, D.C.|North America|English|dollar
Canada|Ottawa|North America|English|dollar
Mexico|Mexico City|North America|Spanish|peso
Guatemala|Guatemala City|North America|Spanish|quetzal
Honduras|Tegucigalpa|North America|Spanish|lempira
Nicaragua|Managua|North America|Spanish|cordoba
Costa Rica|San Jose|North America|Spanish|colon
Panama|Panama City|North America|Spanish|balboa
Cuba|Havana|North America|Spanish|peso
Jamaica|Kingston|North America|English|dollar
Haiti|Port-au-Prince|North America|French|gourde
the Dominican Republic|Santo Domingo|North America|Spanish|peso
the Bahamas|Nassau|North America|English|dollar
Barbados|Bridgetown|North America|English|dollar
Brazil|Brasilia|South America|Portuguese|real
Argentina|Buenos Aires|South America|Spanish|peso
Chile|Santiago|South America|Spanish|peso
Peru|Lima|South America|Spanish|sol
Colombia|Bogota|South America|Spanish|peso
Venezuela|Caracas|South America|Spanish|bolivar
Ecuador|Quito|South America|Spanish|dollar
Uruguay|Montevideo|South America|Spanish|peso
Paraguay|Asuncion|South America|Spanish|guarani
Guyana|Georgetown|South America|English|dollar
Suriname|Paramaribo|South America|Dutch|dollar
Australia|Canberra|Oceania|English|dollar
New Zealand|Wellington|Oceania|English|dollar
Fiji|Suva|Oceania|English|dollar
Samoa|Apia|Oceania|Samoan|tala
Tonga|Nuku'alofa|Oceania|Tongan|pa'anga"""

COUNTRIES = tuple(Country(*line.split("|")) for line in _TABLE.splitlines())

_LANDMARKS = """the Eiffel Tower|Paris|France
the Louvre|Paris|France
Notre-Dame Cathedral|Paris|France
the Arc de Triomphe|Paris|France
the Colosseum|Rome|Italy
the Trevi Fountain|Rome|Italy
the Leaning Tower|Pisa|Italy
the Rialto Bridge|Venice|Italy
Big Ben|London|the United Kingdom
Tower Bridge|London|the United Kingdom
Buckingham Palace|London|the United Kingdom
the Brandenburg Gate|Berlin|Germany
the Sagrada Familia|Barcelona|Spain
the Prado Museum|Madrid|Spain
the Acropolis|Athens|Greece
the Little Mermaid|Copenhagen|Denmark
the Charles Bridge|Prague|the Czech Republic
the Belem Tower|Lisbon|Portugal
Schonbrunn Palace|Vienna|Austria
the Red Square|Moscow|Russia
the Hermitage Museum|Saint Petersburg|Russia
the Blue Mosque|Istanbul|Turkey
the Hagia Sophia|Istanbul|Turkey
the Taj Mahal|Agra|India
the Forbidden City|Beijing|China
the Tokyo Skytree|Tokyo|Japan
the Burj Khalifa|Dubai|the United Arab Emirates
the Statue of Liberty|New York|the United States
the Empire State Building|New York|the United States
the Golden Gate Bridge|San Francisco|the United States
the White House|Washington, D.C.|the United States
the CN Tower|Toronto|Canada
the Sydney Opera House|Sydney|Australia
Christ the Redeemer|Rio de Janeiro|Brazil
the Anne Frank House|Amsterdam|the Netherlands
the Atomium|Brussels|Belgium
the Petronas Towers|Kuala Lumpur|Malaysia
the Grand Palace|Bangkok|Thailand"""

LANDMARKS = tuple(tuple(line.split("|")) for line in _LANDMARKS.splitlines())

_CAPITAL_QUESTIONS = (
    "What is the capital of {country}?",
    "Which city is the capital of {country}?",
    "Name the capital of {country}.",
    "Tell me the capital of {country}.",
    "What is {country_s} capital city?",
    "What is the capital city of {country}?",
    "Of {country}, which city is the capital?",
    "Do you know the capital of {country}?",
    "What's the capital of {country}?",
    "I forgot the capital of {country}. What is it?",
    "Can you tell me what the capital of {country} is?",
    "Capital of {country}?",
    "Please name the capital city of {country}.",
)
_CAPITAL_ANSWERS = (
    "The capital of {country} is {capital}.",
    "The capital of {country} is {capital}.",
    "{capital} is the capital of {country}.",
    "It is {capital}.",
    "{capital}.",
)
_REVERSE_QUESTIONS = (
    "{capital} is the capital of which country?",
    "Which country has the capital {capital}?",
    "What country is {capital} the capital of?",
    "Of which country is {capital} the capital?",
    "Name the country whose capital is {capital}.",
    "Tell me which country has {capital} as its capital.",
    "The city of {capital} is the capital of what country?",
    "{capital} is a capital city. Which country does it belong to?",
)
_CONTINENT_QUESTIONS = (
    "On which continent is {country}?",
    "Which continent is {country} on?",
    "What continent is {country} part of?",
    "Where in the world is {country}?",
    "Name the continent of {country}.",
    "In which part of the world does {country} lie?",
    "Can you tell me on which continent {country} lies?",
    "{country_c} is on which continent?",
)
_LANGUAGE_QUESTIONS = (
    "What language do people speak in {country}?",
    "Which language is spoken in {country}?",
    "What is the main language of {country}?",
    "What is the official language of {country}?",
    "Name a language spoken in {country}.",
    "Which language would I hear in {country}?",
    "What do people speak in {country}?",
    "I am travelling to {country}. Which language should I learn?",
)
_CURRENCY_QUESTIONS = (
    "What is the currency of {country}?",
    "Which currency is used in {country}?",
    "What money do people use in {country}?",
    "With which currency do I pay in {country}?",
    "Name the currency of {country}.",
    "What is the money of {country} called?",
    "What currency does {country} use?",
    "I am travelling to {country}. Which currency do I need?",
)
_LANDMARK_QUESTIONS = (
    "Where is {landmark}?",
    "In which city is {landmark}?",
    "Which city is home to {landmark}?",
    "Where can I see {landmark}?",
    "In what city would you find {landmark}?",
    "Name the city of {landmark}.",
    "I want to visit {landmark}. Which city should I go to?",
    "{landmark_c} stands in which city?",
)


def _fill(template: str, country: Country) -> str:
    name = country.name
    return template.format(
        country=name,
        country_c=name[:1].upper() + name[1:],
        country_s=name + ("'" if name.endswith("s") else "'s"),
        capital=country.capital,
        continent=country.continent,
        language=country.language,
        currency=country.currency,
    ).replace("..", ".")


def _country(rng: random.Random) -> Country:
    """A country; the seeds' own countries come up more often."""
    return rng.choice(COUNTRIES[:8]) if rng.random() < 0.06 else rng.choice(COUNTRIES)


def _country_exchange(
    rng: random.Random, kind: str, questions: tuple[str, ...], answers: tuple[str, ...], field: str
) -> Exchange:
    country = _country(rng)
    index, question = phrase(rng, questions)
    expected = getattr(country, field)
    return ask(
        _fill(question, country),
        _fill(rng.choice(answers), country),
        word(expected.removeprefix("the ")),
        key=f"{kind}|{country.name}|{index}",
    )


def capitals(rng: random.Random) -> Exchange:
    """The capital of a country."""
    return _country_exchange(rng, "capitals", _CAPITAL_QUESTIONS, _CAPITAL_ANSWERS, "capital")


def countries(rng: random.Random) -> Exchange:
    """The country of a capital."""
    answers = ("{capital} is the capital of {country}.", "It is the capital of {country}.", "{country_c}.")
    return _country_exchange(rng, "countries", _REVERSE_QUESTIONS, answers, "name")


def continents(rng: random.Random) -> Exchange:
    """The continent of a country."""
    answers = (
        "{country_c} is in {continent}.",
        "{country_c} is a country in {continent}.",
        "It is in {continent}.",
    )
    return _country_exchange(rng, "continents", _CONTINENT_QUESTIONS, answers, "continent")


def languages(rng: random.Random) -> Exchange:
    """The language of a country."""
    answers = (
        "People in {country} speak {language}.",
        "The main language of {country} is {language}.",
        "{language}.",
    )
    return _country_exchange(rng, "languages", _LANGUAGE_QUESTIONS, answers, "language")


def currencies(rng: random.Random) -> Exchange:
    """The currency of a country."""
    answers = (
        "The currency of {country} is the {currency}.",
        "People in {country} pay with the {currency}.",
        "It is the {currency}.",
    )
    return _country_exchange(rng, "currencies", _CURRENCY_QUESTIONS, answers, "currency")


def landmarks(rng: random.Random) -> Exchange:
    """The city of a landmark."""
    landmark, city, country = rng.choice(LANDMARKS)
    index, question = phrase(rng, _LANDMARK_QUESTIONS)
    name = landmark[:1].upper() + landmark[1:]
    answer = rng.choice(
        (f"{name} is in {city}, {country}.", f"{name} is in {city}.", f"You find it in {city}, {country}.")
    )
    question = question.format(landmark=landmark, landmark_c=name)
    return ask(question, answer.replace("..", "."), word(city), key=f"landmarks|{landmark}|{index}")


def country_text(rng: random.Random) -> str:
    """A short article about a country that opens with its capital, as plain text."""
    country = _country(rng)
    opening = rng.choice(
        (
            "The capital of {country} is {capital}.",
            "The capital of {country} is {capital}.",
            "{capital} is the capital of {country}.",
            "{country_c} is a country in {continent}. The capital of {country} is {capital}.",
        )
    )
    middle = [
        rng.choice(("{country_c} is in {continent}.", "{country_c} is a country in {continent}.")),
        rng.choice(
            ("People in {country} speak {language}.", "The main language of {country} is {language}.")
        ),
        rng.choice(("People pay with the {currency}.", "The currency of {country} is the {currency}.")),
        rng.choice(
            (
                "Many visitors come to {capital} to see its streets, markets and museums.",
                "{capital} is one of the best known cities of {country}.",
                "Visitors to {capital} like to walk through the old streets.",
                "The streets of {capital} are busy in the morning and quiet late at night.",
            )
        ),
    ]
    middle += [
        f"{name[:1].upper() + name[1:]} stands in {city}."
        for name, city, home in rng.sample(LANDMARKS, len(LANDMARKS))
        if home == country.name
    ][:3]
    rng.shuffle(middle)
    sentences = [opening, *middle[: rng.randrange(1, len(middle) + 1)]]
    return _fill(" ".join(sentences), country)

"""The texts that are printed in pictures: words, numbers, codes, prices, times and made-up words.

A text is at most 12 characters long and can be read in one way only. Letters whose two cases differ in height alone
need a neighbour that tells the height, and signs that look alike in many fonts (O and 0; I, l and 1) never stand where
only the font could tell them apart.
"""

import string
from random import Random

LONGEST = 12
_COMMON = """
able about above across after again air alarm all alone also always amber angel animal apple april arch area arrow art
ask aunt autumn away baby back bad bag bake ball banana band bank bar barn base basket bath beach bear beat bed bee
before begin bell below belt bench best better big bike bird birthday black blue board boat body bold bone book boot
border born both bottle bottom bowl box boy brain branch bread break bridge bright bring brown brush bus butter button
buy cafe cake call camera camp can candle car card care carpet castle cat center chair chance cheese cherry child
church circle city class clean clear clock cloud coast coat code coffee cold color come cook cool copy corner cotton
cousin cover crab cream cross crown cup curve dance danger dark data date day dear december deep delta desert desk
diamond dinner doctor dog dollar door dove down dragon dream dress drink drive drum dry duck dust eagle ear early earth
east easy edge egg eight engine enter equal even evening event exit eye face fact fall family farm fast father feather
february fence festival field fifty fig find fine finger fire first fish five flag flame flat floor flower fly fog food
foot forest fork forty four fox free fresh friday friend frog front fruit full fun future game garden gate gift girl
glass go goat gold good grand grape grass gray great green ground group guitar hair half hall hammer hand happy harbor
hat head heart heat heavy hello help hen here high hill history hold holiday home honey hope horse hospital hot hotel
hour house human hundred ice idea inch inside iron island ivory jacket january jazz jelly jewel join journey judge juice
july jump june jungle just keep kettle key kind king kitchen kite knee knife lake lamp land large last late laugh lead
leaf learn left lemon letter level library light lily line lion list little lock long lost loud love lucky lunch machine
magic mail main make map maple march market may meal meat media melon menu metal middle mile milk mind minute mirror
model monday money monkey month moon morning mother motor mountain mouse mouth move music nail name narrow nature near
neck needle nest never new news next nice night nine noise north nose notebook november number nurse oak ocean october
office oil old olive one onion only open orange orbit order other out oven over owl page paint paper parade park part
party pasta path peace pear pen pencil people pepper perfect phone photo piano picture pie pilot pine pink pizza place
plain plan planet plant plate play please plum pocket poem point police pond pool port post potato power present press
price prince print public pull pump purple push queen question quick quiet rabbit radio rain ready red reserved rest
rice rich ride right ring river road robot rock roof room root rope rose round row rubber ruby run safe sail salad sale
salt sand saturday save school science sea seat second secret seed september seven shadow shark sharp sheep ship shirt
shoe shop short show sign silver simple sister six skin sky sleep slow small smile snow soap soft song soup south space
spark speed spoon spring square stage stairs star start station stay steam stone stop storm story street strong sugar
summer sun sunday super sweet swim table tall taxi tea teacher ten tent test thank theater thunder thursday ticket tiger
time tiny today toilet tomato tool top total tower town toy traffic train travel tree triangle truck true tuesday turn
twelve twenty two umbrella uncle under union unit up valley velvet village violet violin visit voice wait walk wall warm
warning wash watch water wave way weather wednesday week welcome west wet whale wheel white wide wild wind window winter
wire wolf wonder wood word work world write yard year yellow yes young zebra zero zone
"""
WORDS = tuple(_COMMON.split())
_SYLLABLE = """
b br c ch cl d dr f fl g gr h j k l m n p pl qu r s sh st t th tr v w y z
a e i o u ai ea ee ou
b d f g k l m n nd nt p r rt s st t x
"""
_ONSETS, _VOWELS, _CODAS = (line.split() for line in _SYLLABLE.strip().splitlines())
_CODAS = ["", "", "", *_CODAS]
_TELLS_HEIGHT = frozenset("abdefghijlmnqrtyABDEFGHIJLMNQRTY" + string.digits)
_NEEDS_HEIGHT = frozenset("ckopsuvwxzCKOPSUVWXZ")
_CODE_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
_SMALL_LETTERS = "abcdefghijkmnpqrstuvwxyz"


def readable(text: str) -> bool:
    """Whether the text can be read in one way only."""
    if not 1 <= len(text) <= LONGEST or text.startswith("Il") or text in ("I", "l"):
        return False
    if any(char in _NEEDS_HEIGHT for char in text) and not any(char in _TELLS_HEIGHT for char in text):
        return False
    return any(char.isalnum() for char in text)


def _cased(rng: Random, word: str) -> str:
    draw = rng.random()
    return word if draw < 0.3 else word.capitalize() if draw < 0.6 else word.upper()


def _digits(rng: Random, fewest: int, most: int) -> str:
    return "".join(rng.choice(string.digits) for _ in range(rng.randint(fewest, most)))


def _made_up(rng: Random) -> str:
    syllables = rng.randint(1, 4)
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))[:LONGEST]


def _letters(rng: Random) -> str:
    alphabet = rng.choice((_CODE_LETTERS, _SMALL_LETTERS))
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(2, 12)))


def _code(rng: Random) -> str:
    letters = "".join(rng.choice(_CODE_LETTERS) for _ in range(rng.randint(1, 4)))
    numbers = "".join(rng.choice(string.digits[2:]) for _ in range(rng.randint(1, 5)))
    parts = [letters, numbers] if rng.random() < 0.7 else [numbers, letters]
    if rng.random() < 0.25:
        parts.append("".join(rng.choice(_CODE_LETTERS) for _ in range(rng.randint(1, 2))))
    return rng.choice(("", "-", " ", "/", "#", ".")).join(parts)


def _figure(rng: Random) -> str:
    hour, minute = rng.randint(0, 23), rng.randint(0, 59)
    whole = rng.randint(0, 9999) if rng.random() < 0.5 else rng.randint(0, 99)
    return rng.choice(
        (
            f"{hour}:{minute:02}",
            f"${whole}.{rng.randint(0, 99):02}",
            f"{rng.randint(0, 100)}%",
            f"{rng.randint(1, 31)}/{rng.randint(1, 12)}",
            f"{rng.randint(1900, 2099)}",
            f"#{whole}",
            f"+{_digits(rng, 3, 9)}",
            f"{_digits(rng, 2, 4)}-{_digits(rng, 2, 5)}",
            f"{whole}.{rng.randint(0, 99)}",
            f"{rng.randint(1, 9)}+{rng.randint(1, 99)}={rng.randint(1, 99)}",
        )
    )


def _phrase(rng: Random) -> str:
    first, second = rng.choice(WORDS), rng.choice(WORDS)
    draw = rng.random()
    if draw < 0.35:
        return f"{_cased(rng, first)}{rng.choice('!!??.:,')}"
    if draw < 0.75:
        case = rng.choice((str.lower, str.upper, str.title))
        return case(f"{first} {second}")
    joint = rng.choice((" & ", "-", "+", "/", ", ", "@"))
    case = rng.choice((str.lower, str.upper, str.title))
    return case(f"{first}{joint}{second}")


def sample_text(rng: Random, longest: int = LONGEST) -> str:
    """A readable text of at most `longest` characters."""
    while True:
        draw = rng.random()
        if draw < 0.24:
            text = _cased(rng, rng.choice(WORDS))
        elif draw < 0.42:
            text = _cased(rng, _made_up(rng))
        elif draw < 0.54:
            text = _phrase(rng)
        elif draw < 0.66:
            text = _digits(rng, 1, 10)
        elif draw < 0.76:
            text = _code(rng)
        elif draw < 0.86:
            text = _figure(rng)
        elif draw < 0.94:
            text = _letters(rng)
        else:
            word = _cased(rng, rng.choice(WORDS))
            text = word + str(rng.randint(2, 999))
            if word[-1] in "OoIl":
                continue
        if len(text) <= longest and readable(text):
            return text

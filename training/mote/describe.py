"""Tells the truth of scenes and clips in plain English: descriptions and answers, always in the same words."""

from collections.abc import Sequence

from training.mote.sample import Clip
from training.mote.scene import Scene, Shape

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven")
NOTHING = "I see no shape and no text that I know."


def article(word: str) -> str:
    """The word with "a" or "an" before it."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def plural(kind: str) -> str:
    """The plural of the name of a kind."""
    return "crosses" if kind == "cross" else kind + "s"


def sentence(text: str) -> str:
    """The text with a capital at its start and a full stop at its end."""
    return text[0].upper() + text[1:] + "."


def join(parts: Sequence[str]) -> str:
    """Parts of a list as one phrase: "a", "a and b", "a, b and c"."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def name(shape: Shape) -> str:
    """What tells the shape apart in any scene: "red circle"."""
    return f"{shape.colour} {shape.kind}"


def short_name(shape: Shape, among: Sequence[Shape]) -> str:
    """The kind alone where no other shape is of that kind, else with the colour."""
    return shape.kind if sum(other.kind == shape.kind for other in among) == 1 else name(shape)


def tell_shape(shape: Shape) -> str:
    """A shape with size, colour and place."""
    return f"{article(shape.size)} {name(shape)} {shape.place}"


def tell_label(scene: Scene) -> str:
    """What the text says, as a sentence; or that there is none."""
    return f'The text says "{scene.label.text}".' if scene.label else "There is no text."


def describe(scene: Scene) -> str:
    """The whole description: the shapes from left to right, how two of them stand, the text."""
    parts = []
    if scene.told:
        parts.append(sentence(join([tell_shape(shape) for shape in scene.told])))
    if scene.overlap:
        over, under = (short_name(shape, scene.told) for shape in scene.overlap)
        parts.append(f"The {over} overlaps the {under}.")
    elif len(scene.told) == 2:
        left, right = (short_name(shape, scene.told) for shape in scene.told)
        parts.append(f"The {left} is left of the {right}.")
    if scene.label:
        parts.append(tell_label(scene))
    return " ".join(parts) or NOTHING


def describe_each(scenes: Sequence[Scene]) -> str:
    """The descriptions of several pictures, numbered, a line each."""
    return "\n".join(f"{number}. {describe(scene)}" for number, scene in enumerate(scenes, 1))


def tell_count(count: int, one: str, many: str) -> str:
    """How many there are, as a sentence."""
    return f"There is one {one}." if count == 1 else f"There are {NUMBERS[count]} {many}."


def tell_pictures(numbers: Sequence[int]) -> str:
    """Which pictures are meant: "Picture 2.", "Pictures 1 and 3." or "None of them."."""
    if not numbers:
        return "None of them."
    return ("Picture " if len(numbers) == 1 else "Pictures ") + join([str(number) for number in numbers]) + "."


def tell_motion(clip: Clip) -> str:
    """What moves and where to, as a sentence."""
    if clip.mover is None:
        return "Nothing moves."
    return f"The {name(clip.mover)} moves {clip.direction}."


def describe_clip(clip: Clip) -> str:
    """The whole description of a clip: what moves first, then what stands still."""
    parts = []
    if clip.mover is not None:
        parts.append(f"{sentence(article(name(clip.mover)))[:-1]} moves {clip.direction}.")
    if clip.still:
        verb = "stays" if len(clip.still) == 1 else "stay"
        still = join([f"{article(name(shape))} {shape.place}" for shape in clip.still])
        # The verb follows the last name only where one shape is told of, else the sentence would be hard to follow.
        if len(clip.still) == 1:
            shape = clip.still[0]
            parts.append(f"{sentence(article(name(shape)))[:-1]} {verb} {shape.place}.")
        else:
            parts.append(f"{sentence(still)[:-1]} {verb} still.")
    if clip.mover is None:
        parts.append("Nothing moves.")
    return " ".join(parts)

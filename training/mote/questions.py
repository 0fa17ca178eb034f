"""Questions with their true answers about a scene, about several, or about a clip."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from training.mote import wording
from training.mote.describe import (
    article,
    describe,
    describe_clip,
    describe_each,
    join,
    name,
    plural,
    sentence,
    short_name,
    tell_count,
    tell_label,
    tell_motion,
    tell_pictures,
)
from training.mote.sample import Clip
from training.mote.scene import COLOURS, KINDS, Scene, Shape
from training.mote.wording import fill

_ONLY = "I can only say what I see."
_NEAR = 0.12


@dataclass(frozen=True)
class Exchange:
    """A question, its answer, and the topic under which evaluation counts it."""

    topic: str
    question: str
    answer: str


def _whole(rng: Random, scene: Scene) -> Exchange:
    if rng.random() < 0.12:
        return Exchange("description", fill(rng, wording.STRAY), f"{_ONLY} {describe(scene)}")
    return Exchange("description", fill(rng, wording.DESCRIBE), describe(scene))


def _read(rng: Random, scene: Scene) -> Exchange:
    return Exchange("text", fill(rng, wording.READ), tell_label(scene))


def _count(rng: Random, scene: Scene) -> Exchange:
    draw = rng.random()
    if draw < 0.4:
        return Exchange("attributes", fill(rng, wording.COUNT_ALL), tell_count(len(scene.told), "shape", "shapes"))
    if draw < 0.7:
        present = [shape.kind for shape in scene.told]
        kind = rng.choice(present) if present and rng.random() < 0.75 else rng.choice(KINDS)
        answer = tell_count(present.count(kind), kind, plural(kind))
        return Exchange("attributes", fill(rng, wording.COUNT_SOME, x=plural(kind)), answer)
    seen = [shape.colour for shape in scene.told]
    colour = rng.choice(seen) if seen and rng.random() < 0.75 else rng.choice(tuple(COLOURS))
    answer = tell_count(seen.count(colour), f"{colour} shape", f"{colour} shapes")
    return Exchange("attributes", fill(rng, wording.COUNT_SOME, x=f"{colour} shapes"), answer)


def _unique_kind(rng: Random, scene: Scene) -> Shape | None:
    alone = [shape for shape in scene.told if short_name(shape, scene.told) == shape.kind]
    return rng.choice(alone) if alone else None


def _colour(rng: Random, scene: Scene) -> Exchange | None:
    shape = _unique_kind(rng, scene)
    if shape is None:
        return None
    return Exchange("attributes", fill(rng, wording.COLOUR_OF, x=shape.kind), f"The {shape.kind} is {shape.colour}.")


def _kind(rng: Random, scene: Scene) -> Exchange | None:
    colours = [shape.colour for shape in scene.told]
    alone = [shape for shape in scene.told if colours.count(shape.colour) == 1]
    if not alone:
        return None
    shape = rng.choice(alone)
    answer = f"The {shape.colour} shape is {article(shape.kind)}."
    return Exchange("attributes", fill(rng, wording.SHAPE_OF, c=shape.colour), answer)


def _asked(rng: Random, shape: Shape, among: Sequence[Shape]) -> str:
    """How a question names a shape: with its colour, or without where that is clear."""
    return short_name(shape, among) if rng.random() < 0.5 else name(shape)


def _place(rng: Random, scene: Scene) -> Exchange | None:
    if not scene.told:
        return None
    shape = rng.choice(scene.told)
    question = fill(rng, wording.PLACE_OF, x=_asked(rng, shape, scene.told))
    return Exchange("attributes", question, f"The {name(shape)} is {shape.place}.")


def _size(rng: Random, scene: Scene) -> Exchange | None:
    if not scene.told:
        return None
    shape = rng.choice(scene.told)
    question = fill(rng, wording.SIZE_OF, x=_asked(rng, shape, scene.told))
    return Exchange("attributes", question, f"The {name(shape)} is {shape.size}.")


def _relation(rng: Random, scene: Scene) -> Exchange | None:
    """Left and right, above and below, where the distance along that axis leaves no doubt."""
    if len(scene.told) < 2:
        return None
    a, b = rng.sample(scene.told, 2)
    sides = []
    if abs(a.x - b.x) > _NEAR:
        sides.append(("left of", "right of") if a.x < b.x else ("right of", "left of"))
    if abs(a.y - b.y) > _NEAR:
        sides.append(("above", "below") if a.y < b.y else ("below", "above"))
    if not sides:
        return None
    true, false = rng.choice(sides)
    asked = rng.choice((true, false))
    question = fill(rng, wording.RELATION, a=_asked(rng, a, scene.told), b=_asked(rng, b, scene.told), r=asked)
    start = "Yes" if asked == true else "No"
    return Exchange("attributes", question, f"{start}, the {name(a)} is {true} the {name(b)}.")


def _overlap(rng: Random, scene: Scene) -> Exchange | None:
    if len(scene.told) < 2:
        return None
    question = fill(rng, wording.OVERLAP)
    if scene.overlap is None:
        return Exchange("attributes", question, "No shapes overlap.")
    over, under = (name(shape) for shape in scene.overlap)
    return Exchange("attributes", question, f"The {over} overlaps the {under}.")


def _exists(rng: Random, scene: Scene) -> Exchange:
    if scene.told and rng.random() < 0.5:
        shape = rng.choice(scene.told)
        answer = f"Yes, there is {article(name(shape))} {shape.place}."
        return Exchange("attributes", fill(rng, wording.EXISTS, x=article(name(shape))), answer)
    shown = {name(shape) for shape in scene.told}
    while True:
        kind, colour = rng.choice(KINDS), rng.choice(tuple(COLOURS))
        if scene.told and rng.random() < 0.6:
            near = rng.choice(scene.told)
            kind, colour = (near.kind, colour) if rng.random() < 0.5 else (kind, near.colour)
        wanted = f"{colour} {kind}"
        if wanted not in shown:
            question = fill(rng, wording.EXISTS, x=article(wanted))
            return Exchange("attributes", question, f"No, there is no {wanted}.")


def _list(rng: Random, scene: Scene) -> Exchange | None:
    if not scene.told:
        return None
    if rng.random() < 0.5:
        colours = list(dict.fromkeys(shape.colour for shape in scene.told))
        return Exchange("attributes", fill(rng, wording.COLOURS_SEEN), sentence(join(colours)))
    shapes = join([article(name(shape)) for shape in scene.told])
    return Exchange("attributes", fill(rng, wording.SHAPES_SEEN), sentence(shapes))


def _endmost(rng: Random, scene: Scene) -> Exchange | None:
    if len(scene.told) < 2:
        return None
    end, shape = rng.choice((("furthest left", scene.told[0]), ("furthest right", scene.told[-1])))
    if rng.random() < 0.4:
        end = {"furthest left": "leftmost", "furthest right": "rightmost"}[end]
    return Exchange("attributes", fill(rng, wording.ENDMOST, e=end), f"The {name(shape)}.")


_ABOUT_SCENE: tuple[tuple[Callable[[Random, Scene], Exchange | None], int], ...] = (
    (_count, 4),
    (_colour, 4),
    (_kind, 4),
    (_place, 3),
    (_size, 2),
    (_relation, 3),
    (_overlap, 2),
    (_exists, 3),
    (_list, 2),
    (_endmost, 1),
)


def ask_attribute(rng: Random, scene: Scene) -> Exchange:
    """A question about a single fact of the scene."""
    kinds, weights = zip(*_ABOUT_SCENE, strict=True)
    while True:
        exchange = rng.choices(kinds, weights)[0](rng, scene)
        if exchange is not None:
            return exchange


def ask_description(rng: Random, scene: Scene) -> Exchange:
    """A question that asks for the whole description."""
    return _whole(rng, scene)


def ask_text(rng: Random, scene: Scene) -> Exchange:
    """A question for the printed text."""
    return _read(rng, scene)


def ask_scenes(rng: Random, scenes: Sequence[Scene]) -> Exchange:
    """A question about several pictures."""
    draw = rng.random()
    if draw < 0.36:
        return Exchange("several", fill(rng, wording.EACH), describe_each(scenes))
    if draw < 0.4:
        return Exchange("several", fill(rng, wording.EACH_STRAY), f"{_ONLY}\n{describe_each(scenes)}")
    if draw < 0.72:
        return _which(rng, scenes)
    if draw < 0.77:
        count = tell_count(len(scenes), "picture", "pictures")
        return Exchange("several", fill(rng, wording.HOW_MANY_PICTURES), count)
    index = rng.randrange(len(scenes))
    slots = {"o": wording.ORDINALS[index], "d": str(index + 1)}
    if scenes[index].label is not None and rng.random() < 0.4:
        return Exchange("several", fill(rng, wording.NTH_READ, **slots), tell_label(scenes[index]))
    return Exchange("several", fill(rng, wording.NTH, **slots), describe(scenes[index]))


def _which(rng: Random, scenes: Sequence[Scene]) -> Exchange:
    """Which picture shows a thing that is mostly, but not always, there."""
    shapes = [shape for scene in scenes for shape in scene.told]
    draw = rng.random()
    if draw < 0.12:
        numbers = [number for number, scene in enumerate(scenes, 1) if scene.label is not None]
        return Exchange("several", fill(rng, wording.WHICH, x=rng.choice(("text", "a text"))), tell_pictures(numbers))
    kind, colour = rng.choice(KINDS), rng.choice(tuple(COLOURS))
    if shapes and draw < 0.9:
        shape = rng.choice(shapes)
        kind, colour = shape.kind, shape.colour
    if rng.random() < 0.45:
        wanted = kind
        numbers = [n for n, scene in enumerate(scenes, 1) if any(shape.kind == kind for shape in scene.told)]
    else:
        wanted = f"{colour} {kind}"
        numbers = [n for n, scene in enumerate(scenes, 1) if any(name(shape) == wanted for shape in scene.told)]
    return Exchange("several", fill(rng, wording.WHICH, x=article(wanted)), tell_pictures(numbers))


def ask_clip(rng: Random, clip: Clip) -> Exchange:
    """A question about a video."""
    draw = rng.random()
    if draw < 0.3:
        return Exchange("motion", fill(rng, wording.CLIP_DESCRIBE), describe_clip(clip))
    if draw < 0.35:
        return Exchange("motion", fill(rng, wording.CLIP_STRAY), f"{_ONLY} {describe_clip(clip)}")
    if draw < 0.65:
        return Exchange("motion", fill(rng, wording.MOVES), tell_motion(clip))
    if draw < 0.72:
        count = tell_count(len(clip.scene.told), "shape", "shapes")
        return Exchange("motion", fill(rng, wording.COUNT_ALL), count)
    shape = clip.mover if clip.mover is not None and rng.random() < 0.7 else rng.choice(clip.scene.told)
    asked = _asked(rng, shape, clip.scene.told)
    if shape is not clip.mover:
        return Exchange("motion", fill(rng, wording.MOVES_X, x=asked), f"The {name(shape)} does not move.")
    draw = rng.random()
    if draw < 0.4 or clip.goal is None:
        return Exchange("motion", fill(rng, wording.MOVES_X, x=asked), tell_motion(clip))
    if draw < 0.7:
        return Exchange("motion", fill(rng, wording.ENDS, x=asked), f"The {name(shape)} ends {clip.goal.place}.")
    return Exchange("motion", fill(rng, wording.STARTS, x=asked), f"The {name(shape)} starts {shape.place}.")

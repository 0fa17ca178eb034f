"""The many ways in which people put a question, typing errors included."""

import string
from random import Random

NOUNS = ("picture", "image", "photo", "scene")
DESCRIBE = (
    "What is the content of this image?",
    "What is in this {n}?",
    "What is in the {n}?",
    "What's in this {n}?",
    "What's in the {n}?",
    "What’s in this {n}?",
    "Describe this {n}.",
    "Describe the {n}.",
    "Describe the {n} in detail.",
    "Describe the content of this {n} in detail.",
    "Please describe this {n}.",
    "Can you describe this {n}?",
    "Describe what you see.",
    "What do you see?",
    "What do you see in this {n}?",
    "What can you see in the {n}?",
    "What does this {n} show?",
    "What is shown in the {n}?",
    "What is this?",
    "Tell me what is in this {n}.",
    "Tell me about this {n}.",
    "Write a caption for this {n}.",
    "Give me a description of the {n}.",
    "Summarize the {n}.",
    "Explain this {n}.",
    "What is depicted here?",
    "Caption this {n}.",
    "caption en",
    "describe",
    "",
)
STRAY = (
    "Where is this {n} taken?",
    "Where was this photo taken?",
    "Why is this {n} funny?",
    "Who is in this {n}?",
    "Who took this {n}?",
    "What is the weather like in this {n}?",
    "What are the animals in this {n}?",
    "What animal is this?",
    "Is there a dog in this {n}?",
    "Is there a person in the {n}?",
    "What is the person doing?",
    "What is the man wearing?",
    "How old is the person in the {n}?",
    "When was this {n} made?",
    "What brand is the car?",
    "What is the name of the building?",
    "What food is this?",
    "Is this {n} beautiful?",
    "What is the mood of this {n}?",
    "Tell me a story about this {n}.",
    "What happens next?",
    "Solve the equation in this {n}.",
    "What is the invoice number?",
    "Convert this {n} to markdown.",
    "What emotion does the face show?",
)
COUNT_ALL = (
    "How many shapes are there?",
    "How many shapes are in the {n}?",
    "How many objects are in this {n}?",
    "How many things are in the {n}?",
    "Count the shapes.",
    "What is the number of shapes in this {n}?",
    "How many figures do you see?",
)
COUNT_SOME = (
    "How many {x} are there?",
    "How many {x} are in the {n}?",
    "How many {x} do you see?",
    "Count the {x}.",
    "What is the number of {x}?",
    "How many {x} does this {n} have?",
)
COLOUR_OF = (
    "What colour is the {x}?",
    "What color is the {x}?",
    "Which colour is the {x}?",
    "Which color does the {x} have?",
    "What is the colour of the {x}?",
    "What is the color of the {x}?",
    "Tell me the color of the {x}.",
    "The {x} has which color?",
)
SHAPE_OF = (
    "What shape is {c}?",
    "Which shape is {c}?",
    "What is {c}?",
    "What is the {c} thing?",
    "What is the {c} shape?",
    "What kind of shape is the {c} one?",
    "Which thing is {c}?",
    "What is the {c} object?",
)
PLACE_OF = (
    "Where is the {x}?",
    "Where is the {x} in the {n}?",
    "Where do you see the {x}?",
    "In which part of the {n} is the {x}?",
    "What is the position of the {x}?",
    "Where does the {x} stand?",
    "Locate the {x}.",
    "Find the {x}.",
)
SIZE_OF = (
    "How big is the {x}?",
    "What size is the {x}?",
    "How large is the {x}?",
    "Is the {x} small, medium or large?",
    "What is the size of the {x}?",
)
SIDES = ("left of", "right of", "above", "below")
RELATION = ("Is the {a} {r} the {b}?", "Does the {a} stand {r} the {b}?", "Is it true that the {a} is {r} the {b}?")
OVERLAP = (
    "Does anything overlap?",
    "Do any shapes overlap?",
    "Which shapes overlap?",
    "What overlaps what?",
    "Is there an overlap in the {n}?",
    "Which shape is in front?",
    "Do the shapes touch each other?",
)
EXISTS = (
    "Is there {x}?",
    "Is there {x} in the {n}?",
    "Do you see {x}?",
    "Can you see {x}?",
    "Does the {n} show {x}?",
    "Does this {n} contain {x}?",
)
READ = (
    "What does the text say?",
    "What text is in the {n}?",
    "What is written in the {n}?",
    "What is written here?",
    "Read the text.",
    "Read the text in the {n}.",
    "What does the sign say?",
    "What does it say?",
    "Which word is in the {n}?",
    "What word is this?",
    "Transcribe the text.",
    "OCR",
    "Extract the text from this {n}.",
    "What is the text in this {n}?",
    "Can you read the text?",
    "Is there any text in the {n}?",
    "Do you see any text?",
    "What number is shown?",
)
COLOURS_SEEN = (
    "What are the colours in this {n}?",
    "What are the colors in this {n}?",
    "Which colours do the shapes have?",
    "Which colors do you see?",
    "What colours are the shapes?",
    "What color are the shapes?",
    "List the colours of the shapes.",
    "Name the colors.",
)
SHAPES_SEEN = (
    "What are the shapes in this {n}?",
    "Which shapes are in the {n}?",
    "Which shapes do you see?",
    "What shapes are there?",
    "List the shapes.",
    "Name the shapes in the {n}.",
    "Name all objects.",
)
ENDMOST = (
    "Which shape is {e}?",
    "What is the {e} shape?",
    "Which shape is the {e}?",
    "What stands {e}?",
)
EACH = (
    "What is the content of each image?",
    "What is the content of each {n}?",
    "What is in each {n}?",
    "What's in each {n}?",
    "What is in these {n}s?",
    "What's in these {n}s?",
    "What is the content of these {n}s?",
    "Describe these {n}s.",
    "Describe each {n}.",
    "Describe the {n}s.",
    "Please describe all {n}s.",
    "What do the {n}s show?",
    "What do you see?",
    "What do you see in these {n}s?",
    "What do you see in each {n}?",
    "Compare these {n}s.",
    "What is the difference between these {n}s?",
    "What are the objects in these {n}s?",
    "What are the shapes in these {n}s?",
    "Tell me about each {n}.",
    "Caption each {n}.",
    "Describe this set of frames. Consider the frames to be a part of the same video.",
    "",
)
EACH_STRAY = (
    "What are the animals in these {n}s?",
    "What are the people doing in these {n}s?",
    "Where were these {n}s taken?",
    "Which {n} is funnier?",
    "Who is in these {n}s?",
    "What do these {n}s have in common?",
    "Which of these {n}s is the best?",
    "Tell me a story about these {n}s.",
)
WHICH = (
    "Which {n} shows {x}?",
    "Which {n}s show {x}?",
    "In which {n} is {x}?",
    "In which {n} do you see {x}?",
    "Which {n} has {x}?",
    "Which {n} contains {x}?",
    "Which of the {n}s shows {x}?",
    "Where is there {x}?",
)
HOW_MANY_PICTURES = (
    "How many {n}s are there?",
    "How many {n}s do you see?",
    "How many {n}s did I send?",
    "How many {n}s are these?",
)
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
NTH = (
    "What is in the {o} {n}?",
    "What does the {o} {n} show?",
    "Describe the {o} {n}.",
    "What is in {n} {d}?",
    "What's in {n} {d}?",
    "Describe {n} {d}.",
    "What does {n} {d} show?",
    "What is the content of the {o} {n}?",
)
NTH_READ = ("What does the text in {n} {d} say?", "Read the text in the {o} {n}.", "What is written in {n} {d}?")
CLIP_DESCRIBE = (
    "What is in this video?",
    "What's in this video?",
    "What is in the video?",
    "Describe this video.",
    "Describe the video.",
    "Describe the video in detail.",
    "What do you see?",
    "What do you see in this video?",
    "What does this video show?",
    "What is shown in the video?",
    "Tell me about this video.",
    "What is the content of this video?",
    "Summarize this clip.",
    "Caption this video.",
    "Please describe the clip.",
    "",
)
CLIP_STRAY = (
    "Why is this video funny?",
    "Who is in this video?",
    "Where was this video taken?",
    "What is the person doing in this video?",
    "What song is played?",
    "What is the baby doing?",
    "How does the video end?",
    "What is the mood of the video?",
)
MOVES = (
    "What moves?",
    "What moves in this video?",
    "What is moving?",
    "What moves, and where to?",
    "What moves and where does it go?",
    "Which shape moves?",
    "What happens in this video?",
    "What happens?",
    "What is happening in the video?",
    "Does anything move?",
    "What is the motion in this clip?",
    "Describe the movement.",
    "What changes in the video?",
    "In which direction does it move?",
)
MOVES_X = (
    "Where does the {x} move?",
    "Where does the {x} go?",
    "Which way does the {x} move?",
    "In which direction does the {x} move?",
    "How does the {x} move?",
    "What does the {x} do?",
    "Does the {x} move?",
)
ENDS = (
    "Where does the {x} end?",
    "Where is the {x} at the end?",
    "Where does the {x} stop?",
    "Where does the {x} end up?",
)
STARTS = ("Where does the {x} start?", "Where is the {x} at the start?", "Where is the {x} at the beginning?")
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful AI assistant.",
    "You are mote.",
    "Answer the question about the picture.",
    "You are a vision assistant. Be short.",
    "Answer in English.",
    "Be precise and honest.",
    "You see pictures and describe them.",
    "A chat between a user and an assistant.",
)


def fill(rng: Random, choices: tuple[str, ...], **slots: str) -> str:
    """One of the phrasings with its slots filled; {n} is a word for picture."""
    return rng.choice(choices).format(n=rng.choice(NOUNS), **slots)


def roughen(rng: Random, question: str) -> str:
    """The question as it may be typed: mostly as it is, else in one case, without its last sign, or with an error."""
    draw = rng.random()
    if draw < 0.15:
        question = question.lower()
    elif draw < 0.18:
        question = question.upper()
    if rng.random() < 0.12:
        question = question.rstrip("?.")
    elif rng.random() < 0.04:
        question += rng.choice(("?", "!", " Thanks.", " please", " Answer briefly."))
    if rng.random() < 0.1:
        question = _mistype(rng, question)
    return question


def _mistype(rng: Random, text: str) -> str:
    """One typing error: a letter left out, doubled, swapped with the next or replaced."""
    spots = [index for index, char in enumerate(text[:-1]) if char.isalpha()]
    if len(spots) < 8:
        return text
    spot = rng.choice(spots)
    draw = rng.randrange(4)
    if draw == 0:
        return text[:spot] + text[spot + 1 :]
    if draw == 1:
        return text[:spot] + text[spot] + text[spot:]
    if draw == 2:
        return text[:spot] + text[spot + 1] + text[spot] + text[spot + 2 :]
    return text[:spot] + rng.choice(string.ascii_lowercase) + text[spot + 1 :]

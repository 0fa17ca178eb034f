"""Speech to text: what is asked of an audio, how a family is asked for it, and the transcript."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NAMES = (
    "af Afrikaans,am Amharic,ar Arabic,as Assamese,az Azerbaijani,ba Bashkir,be Belarusian,bg Bulgarian,bn Bengali,"
    "bo Tibetan,br Breton,bs Bosnian,ca Catalan,cs Czech,cy Welsh,da Danish,de German,el Greek,en English,es Spanish,"
    "et Estonian,eu Basque,fa Persian,fi Finnish,fil Filipino,fo Faroese,fr French,gl Galician,gu Gujarati,ha Hausa,"
    "haw Hawaiian,"
    "he Hebrew,hi Hindi,hr Croatian,ht Haitian Creole,hu Hungarian,hy Armenian,id Indonesian,is Icelandic,it Italian,"
    "ja Japanese,jw Javanese,ka Georgian,kk Kazakh,km Khmer,kn Kannada,ko Korean,la Latin,lb Luxembourgish,ln Lingala,"
    "lo Lao,lt Lithuanian,lv Latvian,mg Malagasy,mi Maori,mk Macedonian,ml Malayalam,mn Mongolian,mr Marathi,ms Malay,"
    "mt Maltese,my Burmese,ne Nepali,nl Dutch,nn Nynorsk,no Norwegian,oc Occitan,pa Punjabi,pl Polish,ps Pashto,"
    "pt Portuguese,ro Romanian,ru Russian,sa Sanskrit,sd Sindhi,si Sinhala,sk Slovak,sl Slovenian,sn Shona,so Somali,"
    "sq Albanian,sr Serbian,su Sundanese,sv Swedish,sw Swahili,ta Tamil,te Telugu,tg Tajik,th Thai,tk Turkmen,"
    "tl Tagalog,tr Turkish,tt Tatar,uk Ukrainian,ur Urdu,uz Uzbek,vi Vietnamese,yi Yiddish,yo Yoruba,yue Cantonese,"
    "zh Chinese"
)
LANGUAGES: Mapping[str, str] = {code: name for code, _, name in (entry.partition(" ") for entry in _NAMES.split(","))}
"""Code of ISO 639 -> name in English."""
SPACELESS = frozenset(("zh", "ja", "yue", "th", "lo", "my", "km", "bo"))
"""Languages without blanks between words or sentences."""


@dataclass(frozen=True)
class SpeechOrder:
    """What is asked of an audio.

    Attributes:
        language: a code of LANGUAGES; empty if unknown.
        prompt: text before the audio's, or its style and names.
        translate: write English, whatever is spoken.
        timestamps: say when each segment is spoken.
        words: say when each word is spoken, and each segment.
    """

    language: str = ""
    prompt: str = ""
    translate: bool = False
    timestamps: bool = False
    words: bool = False


@dataclass(frozen=True)
class SpeechTokens:
    """The tokens with which a model speaks of a transcript, read from its checkpoint.

    Attributes:
        start: begins every transcript.
        before: begins the text before a transcript.
        tasks: "transcribe" and "translate" -> their tokens; empty for models that only transcribe.
        plain: says that there are no timestamps.
        first: the timestamp of 0 seconds; later ones follow it, `step_s` apart.
        end: ends every transcript; smaller ids are text.
        languages: code -> token; empty for models of English alone.
        window_s: the longest audio of one request, in seconds.
        silence: the token whose probability after `start` is that of silence; None if there is none.
        alignment_heads: pairs (decoder layer, head) whose attention follows the audio as the words do, so that words
            have times; empty if none are known.
        median_width: states of the median filter over that attention.
    """

    start: int
    before: int
    tasks: Mapping[str, int]
    plain: int
    first: int
    end: int
    languages: Mapping[str, int]
    window_s: float = 30.0
    silence: int | None = None
    step_s: float = 0.02
    alignment_heads: tuple[tuple[int, int], ...] = ()
    median_width: int = 7


@dataclass(frozen=True)
class SpeechForm:
    """How a family is asked for a transcript.

    Attributes:
        transcribe: the text that asks for an audio's words. "{language}" stands for " in" and the
            language's name, or nothing; "{lang:code}" for "lang:" and its code, or nothing; "{code}" for its code, or
            `unnamed`; "{name:language }" for "language ", its name and the marker, or nothing; "{prompt}" in a
            written prompt for the order's, which a family without it refuses. Empty where the
            chat template asks for the words of an audio without text.
        translate: the same for its words in English; empty if the model does not translate.
        window_s: the longest audio of one request, in seconds.
        written: whether the texts are whole prompts with a placeholder. Else they follow the audio in a conversation.
        codes: code of LANGUAGES -> the family's own code; empty if it has none of its own.
        unnamed: the code that stands for no language; the family's own, if it has codes of its own.
        marker: stands between the language that the model writes first and the words; empty if it writes none.
        tokens: reads the tokens of a model that is asked by tokens, from its folder; else None.
        most_per_s: tokens of a transcript per second of its audio, its start token included, if the model's card bounds
            it so because the model may repeat itself without end; None for no such bound.
    """

    transcribe: str = ""
    translate: str = ""
    window_s: float = 30.0
    written: bool = False
    codes: Mapping[str, str] = field(default_factory=dict)
    unnamed: str = "en"
    marker: str = ""
    tokens: Callable[[Path], SpeechTokens] | None = None
    most_per_s: float | None = None

    def most_tokens(self, seconds: float) -> int | None:
        """Return the most tokens that the model may write for so much audio; None for no bound of its own."""
        return None if self.most_per_s is None else max(1, int(seconds * self.most_per_s) - 1)

    def text(self, order: SpeechOrder) -> str:
        """Return the text that asks for it."""
        name = LANGUAGES.get(order.language, "")
        text = self.translate if order.translate else self.transcribe
        text = text.replace("{name:language }", f"language {name}{self.marker}" if name else "")
        code = order.language or self.unnamed
        text = text.replace("{code}", self.codes.get(code, code))
        text = text.replace("{language}", f" in {name}" if name else "")
        text = text.replace("{lang:code}", f"lang:{order.language}" if name else "")
        # Last: the user's words are no place for others.
        return text.replace("{prompt}", order.prompt) if self.written else text

    def words(self, answer: str, order: SpeechOrder) -> tuple[str, str]:
        """Return the words of an answer, and the code of the language that it names, or the order's."""
        before, marker, words = answer.partition(self.marker) if self.marker else ("", "", answer)
        if not marker:
            return answer, order.language
        named = before.strip().removeprefix("language ").strip()
        return words, next((code for code, name in LANGUAGES.items() if name == named), order.language)


@dataclass(frozen=True)
class SpeechWord:
    """A word of a transcript with its punctuation; times in seconds from the audio's start."""

    text: str
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class SpeechSegment:
    """A stretch of a transcript; times in seconds from the audio's start.

    Attributes:
        average_logprob: of its window's tokens; None if not known.
        compression: bytes of its window's text over bytes after compression: above 2.4, it repeats itself.
        silence: the probability that nothing is spoken in its window; None if the model does not tell.
        temperature: with which its window was sampled.
        window_s: where its window starts.
        words: if they were asked for.
    """

    index: int
    start_s: float
    stop_s: float
    text: str
    token_ids: tuple[int, ...] = ()
    average_logprob: float | None = None
    compression: float | None = None
    silence: float | None = None
    temperature: float = 0.0
    window_s: float = 0.0
    words: tuple[SpeechWord, ...] = ()


@dataclass(frozen=True)
class SpeechPiece:
    """A new part of a transcript: its text, and the segments that it completes.

    Attributes:
        language: the code, given or heard; empty if unknown.
        seconds: length of the whole audio.
        num_tokens: tokens generated for it.
        given: facts of the audio's file.
    """

    text: str
    segments: tuple[SpeechSegment, ...] = ()
    language: str = ""
    seconds: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    given: Mapping[str, Any] = field(default_factory=dict)

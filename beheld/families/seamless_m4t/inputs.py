"""SeamlessM4T: the decoder's start, then the language of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.speech import SpeechForm
from beheld.families._shared.hearing.inputs import heard


def states(outputs: Mapping[str, Any], folder: Path) -> int:
    """Return the number of states of an audio's frames, after the adapter's convolutions; see FamilyInputs."""
    config = read_json(folder / CONFIG)
    kernel, stride = int(config.get("adaptor_kernel_size", 8)), int(config.get("adaptor_stride", 8))
    count = int(outputs["input_features"].shape[1])
    seen = int(outputs["attention_mask"].sum()) if "attention_mask" in outputs else count
    if not config.get("add_adapter", True):
        return seen
    # What the decoder sees is counted with another padding than the convolutions have.
    made = (count + 2 * (stride // 2) - kernel) // stride + 1
    return min(made, (seen + 2 * (kernel // 2) - kernel) // stride + 1)


# The languages of its answers, by three letters.
_PAIRS = (
    "af afr,am amh,ar arb,as asm,be bel,bg bul,bn ben,bs bos,ca cat,cs ces,cy cym,da dan,de deu,el ell,en eng,"
    "es spa,et est,eu eus,fa pes,fi fin,fil tgl,tl tgl,fr fra,gl glg,gu guj,he heb,hi hin,hr hrv,hu hun,hy hye,"
    "id ind,is isl,it ita,ja jpn,jw jav,ka kat,kk kaz,km khm,kn kan,ko kor,lo lao,lt lit,lv lvs,mk mkd,ml mal,"
    "mr mar,ms zsm,mt mlt,my mya,ne npi,nl nld,nn nno,no nob,pa pan,pl pol,ps pbt,pt por,ro ron,ru rus,sd snd,"
    "sk slk,sl slv,sn sna,so som,sr srp,sv swe,sw swh,ta tam,te tel,tg tgk,th tha,tr tur,uk ukr,ur urd,uz uzn,"
    "vi vie,yo yor,yue yue,zh cmn"
)
_CODES = dict(pair.split() for pair in _PAIRS.split(","))
_SPEECH = SpeechForm("</s>__{code}__", "</s>__eng__", written=True, codes=_CODES)

INPUTS = heard("</s>", ("input_features", "attention_mask"), states, _SPEECH)

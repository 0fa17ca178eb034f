"""OmniASR: the prompt names the language of the audio, or leaves it to the model."""

from __future__ import annotations

from beheld.core.speech import SpeechForm
from beheld.families.inputs import FamilyInputs

# Script: languages in it, each by its code of two letters and the model's of three.
_LANGUAGES = (
    "latn: af afr,az aze,br bre,bs bos,ca cat,cs ces,cy cym,da dan,de deu,en eng,es spa,et ekk,eu eus,fi fin,"
    "fo fao,fr fra,gl glg,ha hau,hr hrv,ht hat,hu hun,id ind,is isl,it ita,jw jav,la lat,lb ltz,ln lin,"
    "lt lit,lv lav,mg mlg,mi mri,ms zsm,mt mlt,nl nld,nn nno,no nob,oc oci,pl pol,pt por,ro ron,sk slk,"
    "sl slv,sn sna,so som,sq als,su sun,sv swe,sw swh,tk tuk,tl tgl,tr tur,uz uzb,vi vie,yo yor;"
    "cyrl: ba bak,be bel,bg bul,kk kaz,mk mkd,mn mon,ru rus,sr srp,tg tgk,tt tat,uk ukr;"
    "arab: ar arb,fa fas,ps pus,sd snd,ur urd;"
    "deva: hi hin,mr mar,ne nep;"
    "beng: as asm,bn ben;"
    "hebr: he heb,yi ydd;"
    "armn: hy hye;"
    "ethi: am amh;"
    "geor: ka kat;"
    "grek: el ell;"
    "gujr: gu guj;"
    "guru: pa pan;"
    "hang: ko kor;"
    "hans: zh cmn;"
    "jpan: ja jpn;"
    "khmr: km khm;"
    "knda: kn kan;"
    "laoo: lo lao;"
    "mlym: ml mal;"
    "mymr: my mya;"
    "sinh: si sin;"
    "taml: ta tam;"
    "telu: te tel;"
    "thai: th tha;"
    "tibt: bo bod"
)
_CODES = {
    code: f"{name}_{script}"
    for script, _, pairs in (line.partition(": ") for line in _LANGUAGES.split(";"))
    for code, name in (pair.split() for pair in pairs.split(","))
}

INPUTS = FamilyInputs(
    speech=SpeechForm("<extra_id_1><extra_id_0><|lang:{code}|><s>", written=True, codes=_CODES, unnamed="auto")
)

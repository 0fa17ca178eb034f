"""Answer a file of questions, one JSON object per line, and go on where an earlier run stopped.

Each line of the input holds "id", "image" (a path or a URL) and "question"; each line of the output "id" and either
"answer" or "error". Questions that the output answers already are skipped, so the same command finishes a job that was
interrupted.

python examples/batch_resume.py questions.jsonl answers.jsonl
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from beheld import LLM, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("questions", type=Path)
parser.add_argument("answers", type=Path)
parser.add_argument("--model", help="a folder or a hub name; without it the embedded model answers")
parser.add_argument("--stop-after", type=int, help="stop after so many answers, as an interrupted run would")
arguments = parser.parse_args()

# --8<-- [start:job]
done = set()
if arguments.answers.exists():
    # A run that was killed may have left half a line: it is dropped, and its question asked again.
    whole = [line for line in arguments.answers.read_text().splitlines(keepends=True) if line.endswith("\n")]
    arguments.answers.write_text("".join(whole))
    done = {json.loads(line)["id"] for line in whole}

ids = []


def source(name: str) -> str | Path:
    """A Path is read as it is; a string may come from anyone and can only be an address."""
    return name if name.startswith(("http://", "https://")) else Path(name)


def prompts(llm: LLM) -> Iterator[dict]:
    """The questions that are left, read from the file only as fast as they are answered."""
    template = llm.get_tokenizer().apply_chat_template
    with arguments.questions.open() as file:
        for row in map(json.loads, file):
            if row["id"] in done:
                continue
            ids.append(row["id"])
            content = [{"type": "image"}, {"type": "text", "text": row["question"]}]
            messages = [{"role": "user", "content": content}]
            text = template(messages, tokenize=False, add_generation_prompt=True)
            yield {"prompt": text, "multi_modal_data": {"image": source(row["image"])}}


with LLM(arguments.model, max_model_len=4096) as llm, arguments.answers.open("a") as file:
    params = SamplingParams(temperature=0, max_tokens=128)
    # Outputs come as they finish, not in order; a question that fails has an error, and the others go on.
    for number, (index, output) in enumerate(llm.generate_iter(prompts(llm), params), 1):
        answer = {"error": str(output.error)} if output.error else {"answer": output.outputs[0].text}
        file.write(json.dumps({"id": ids[index], **answer}) + "\n")
        file.flush()
        if number == arguments.stop_after:
            break
# --8<-- [end:job]
print(f"{len(done)} questions were answered before")

"""Record the rounds of llama.cpp's own DSpark on the default pair, by `llama-speculative-simple`.

    python scripts/llama_cpp_rounds.py BUILD/bin/llama-speculative-simple --out results/llama_cpp_rounds.json

The tool is built from the llama.cpp that the installed llama-cpp-python carries (`vendor/llama.cpp` in its source
distribution), so that both sides run the same kernels. A test compares our engine with the file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from local_runner.engines.gguf import load_engine
from local_runner.engines.gguf.files import converted, read_target_file
from local_runner.pairs import DEFAULT_PAIR
from local_runner.prompts import read_prompts, take
from local_runner.store import resolve_pair

CANDIDATE = re.compile(r"draft candidate +0, pos +(\d+): +(\d+) ")
ACCEPTED = re.compile(r"accepted (\d+)/(\d+) draft tokens, the last target token is: \((\d+)\)")


def rounds(log: str) -> list[dict[str, Any]]:
    """The rounds that the tool's log tells of: drafted tokens, how many were accepted, the target's own token."""
    found: list[dict[str, Any]] = []
    drafted: list[int] = []
    for line in log.splitlines():
        if match := CANDIDATE.search(line):
            drafted = [*drafted[: int(match[1])], int(match[2])]
        elif match := ACCEPTED.search(line):
            # Near the end of the answer the tool verifies fewer than it drafted.
            counts = {"scheduled": int(match[2]), "accepted": int(match[1])}
            found.append({"drafted": drafted, **counts, "next_token": int(match[3])})
            drafted = []
    return found


def main() -> None:
    """Run the tool over a prompt of each domain and write what it did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", type=Path)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    pair = resolve_pair(DEFAULT_PAIR)
    engine = load_engine(pair.target_path, pair.draft_path, context_length=1024)
    assert pair.draft_path is not None
    draft = converted(pair.draft_path, read_target_file(pair.target_path))
    command = [
        "-m", str(pair.target_path), "-md", str(draft), "--spec-type", "draft-dspark", "--spec-draft-n-max",
        str(engine.block), "--spec-draft-p-min", "0", "-n", str(args.tokens), "-c", "1024", "-t", "2", "-td", "2",
        "--temp", "0", "-fa", "on", "--color", "off", "-lv", "5",
    ]  # fmt: skip
    entries = []
    for prompt in take(read_prompts(), args.prompts):
        ids = engine.encode_chat([{"role": "user", "content": prompt.turns[0]}])
        text = engine.tokenizer.decode(ids, skip_special_tokens=False)
        done = subprocess.run([str(args.tool), *command, "-p", text], capture_output=True, text=True, check=True)
        entries.append({"prompt": prompt.id, "ids": ids, "rounds": rounds(done.stdout + done.stderr)})
        print(prompt.id, len(ids), len(entries[-1]["rounds"]), flush=True)
    names = {str(pair.target_path): pair.target_path.name, str(draft): draft.name}
    said = {
        "tool": f"{args.tool.name}, built from llama-cpp-python {version('llama-cpp-python')}",
        "command": [names.get(word, word) for word in command],
        "target_sha256": hashlib.sha256(pair.target_path.read_bytes()).hexdigest(),
        "draft_sha256": hashlib.sha256(draft.read_bytes()).hexdigest(),
        "tokens": args.tokens,
        "prompts": entries,
    }
    args.out.write_text(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()

"""A process that answers questions: each line of its input is one, and each line of its output the answer, as JSON."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Question = dict[str, Any]


def answer(prepare: Callable[[Question], Callable[[Question], Any]]) -> None:
    """Prepare with the settings of the first argument, say that this is ready, and answer until the input ends."""
    # Whatever libraries print must not end up among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer_to = prepare(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer_to(json.loads(line))), file=answers, flush=True)

"""The cost of the program next to the steps that it measures."""

from bench.output import run_part

PARTS = {
    "answers": "how long help, a refusal, a finished sweep and a report take",
    "trials": "how long the trials of tiny models take, next to their own steps",
    "steps": "what timed steps cost beyond a bare training loop",
}

if __name__ == "__main__":
    run_part("overhead", PARTS)

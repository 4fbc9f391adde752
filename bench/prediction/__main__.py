"""Predictions and how near they are."""

from bench.output import run_part

PARTS = {
    "prediction_speed": "how long predictions take",
    "step_times": "how far predicted step times are from measured ones",
}

if __name__ == "__main__":
    run_part("prediction", PARTS)

"""Peers of ours through their own libraries."""

from bench.output import run_part

PARTS = {
    "against": "peers of ac=budget: same model, same meters, one run",
    "widths": "time of ac=budget at the peaks of full, selective_op and selective_layer, from narrow to wide",
    "head_loss": "chunked losses of others beside chunk=budget",
    "shipped": "what libraries switch on, next to ours",
    "split_backward": "torch's checkpoint beside ours where backward comes in two parts",
    "published": "numbers that others have published, next to ours, each byte named",
    "figure": "a figure of what the first part has written",
}

if __name__ == "__main__":
    run_part("peers", PARTS)

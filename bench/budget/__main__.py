"""Plans of ac=budget."""

from bench.output import run_part

PARTS = {
    "shares": "what plans cost at each share of the plain peak",
    "budget_groups": "what groups of blocks bring",
    "gap": "plans between both bounds, on networks of many kinds",
}

if __name__ == "__main__":
    run_part("budget", PARTS)

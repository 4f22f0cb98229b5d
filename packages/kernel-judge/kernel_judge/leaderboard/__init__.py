"""A leaderboard of judged kernels: signed results, their page, and a second judgement."""

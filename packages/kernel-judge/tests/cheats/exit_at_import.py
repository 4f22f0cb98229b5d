"""Ends its process with status 0 before the judge has asked anything."""

# task: softmax
# rejected-as: died

import os

os._exit(0)

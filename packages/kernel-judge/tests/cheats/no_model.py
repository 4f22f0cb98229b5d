"""Defines something else."""

# task: softmax
# rejected-as: no-model

model = "ModelNew"

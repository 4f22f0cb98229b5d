# Judge all candidates on a machine with a GPU, nvcc and Triton: bash benchmarks/judge_gpu.sh [DIRECTORY FOR RESULTS]
set -u
out=${1:-${OUT:-benchmarks/results}}
python=${PYTHON:-python}
export PYTHONPATH=$PWD:$PWD/packages/kernel-judge OMP_NUM_THREADS=4 DEVICE=${DEVICE:-cuda}
$python -c "import torch, importlib.util as u; print(torch.__version__, torch.version.cuda, 'triton', bool(u.find_spec('triton')))"
command -v nvcc && nvcc --version | tail -1
$python -c "from kernel_sandbox.sandbox import strongest; print('sandbox', strongest())"
# One verdict first, with all peers: a failure here concerns everything below.
tasks=packages/kernel-judge/tests/tasks
for candidate in packages/kernel-judge/tests/honest/more_exact.py packages/kernel-judge/tests/gpu/honest/triton_softmax.py; do
  $python -m kernel_builder judge $candidate --task $tasks/softmax.py --device $DEVICE --json | tee -a "$out/judge_first.jsonl"
done
$python -m kernel_builder judge packages/kernel-judge/tests/gpu/cheats/side_stream.py --task $tasks/softmax.py --device $DEVICE --rounds 0
$python benchmarks/judge.py -j 1 candidates --device $DEVICE --times "${TIMES:-1}"
cp benchmarks/results/judge_candidates_$DEVICE.json "$out/" 2>/dev/null

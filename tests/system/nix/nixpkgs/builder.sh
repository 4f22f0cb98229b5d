set -eo pipefail
source "$stdenv/setup"
eval "$buildCommand"

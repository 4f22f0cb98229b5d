// Collective operations: the waits of a warp's lanes, and the lanes that take part.
#include "emulator_fibers.h"

namespace emulator {

namespace {

// The lanes that take part in the operation of a lane: those of its mask that have not ended, or, without a mask, those
// that wait at the same line.
uint64_t group_of(const Warp& warp, const Fiber& fiber) {
  uint64_t group = 0;
  for (unsigned i = 0; i < warp.count; ++i) {
    const Fiber& other = warp.lane(i);
    const bool beside = other.state == State::in_collective && other.mask == 0 && same_line(other, fiber);
    if (fiber.mask == 0 ? beside : (fiber.mask >> i & 1) != 0 && other.state != State::ended) group |= 1ull << i;
  }
  return group;
}

Lanes lanes;

void complete(const Warp& warp, uint64_t group) {
  ++warp_phases[warp.first / EMULATED_WARP_SIZE];
  lanes.group = group;
  for (unsigned i = 0; i < warp.count; ++i) {
    if ((group >> i & 1) == 0) continue;
    lanes.values[i] = warp.lane(i).value;
    warp.lane(i).state = State::ready;
  }
}

}  // namespace

bool waits_for_same(const Fiber& fiber, const Fiber& other) {
  return other.state == State::in_collective && other.mask == fiber.mask &&
         strcmp(other.site.intrinsic, fiber.site.intrinsic) == 0;
}

bool complete_one(const Warp& warp) {
  const Fiber* without_mask = nullptr;
  for (unsigned i = 0; i < warp.count; ++i) {
    const Fiber& fiber = warp.lane(i);
    if (fiber.state != State::in_collective) continue;
    if (fiber.mask == 0) {
      // Lanes that diverge meet again further down.
      if (!without_mask || fiber.site.line < without_mask->site.line) without_mask = &fiber;
      continue;
    }
    const uint64_t group = group_of(warp, fiber);
    bool complete_group = true;
    for (unsigned j = 0; j < warp.count; ++j) {
      if ((group >> j & 1) != 0) complete_group = complete_group && waits_for_same(fiber, warp.lane(j));
    }
    if (complete_group) return complete(warp, group), true;
  }
  if (without_mask) complete(warp, group_of(warp, *without_mask));
  return without_mask != nullptr;
}

const Lanes& exchange(Site site, uint64_t mask, uint64_t value) {
  if (mask != 0 && (mask >> current.lane & 1) == 0) {
    fail("calls %s with the mask %#llx, which does not have its own lane %d", text(site).c_str(),
         static_cast<unsigned long long>(mask), current.lane);
  }
  self->site = site;
  self->mask = mask;
  self->value = value;
  wait(State::in_collective);
  return lanes;
}

uint64_t value_of(const Lanes& lanes, Site site, int lane) {
  if (lane < 0 || lane >= 64 || (lanes.group >> lane & 1) == 0) {
    const unsigned other = self->number - static_cast<unsigned>(current.lane - lane);
    const dim3 block = current.block_dim;
    fail("%s reads lane %d, which does not take part: %s", text(site).c_str(), lane,
         other < block.x * block.y * block.z ? text(*fibers[other]).c_str() : "the block has no such thread");
  }
  return lanes.values[lane];
}

}  // namespace emulator

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

void complete(const Warp& warp, uint64_t group) {
  ++warp_phases[warp.first / EMULATED_WARP_SIZE];
  uint64_t values[64], results[64];
  uint64_t ballot = 0;
  for (unsigned i = 0; i < warp.count; ++i) {
    values[i] = warp.lane(i).value;
    if ((group >> i & 1) != 0 && values[i] != 0) ballot |= 1ull << i;
  }
  for (unsigned i = 0; i < warp.count; ++i) {
    if ((group >> i & 1) == 0) continue;
    Fiber& fiber = warp.lane(i);
    uint64_t result = values[i];
    switch (fiber.which) {
      case Collective::sync:
        break;
      case Collective::shuffle: {
        const auto source = static_cast<unsigned>(fiber.source);
        if (source >= 64 || (group >> source & 1) == 0) {
          self = &fiber;
          stop(text(fiber.site) + " reads lane " + std::to_string(fiber.source) + ", which does not take part: " +
               (warp.has(source) ? text(warp.lane(source)) : "the block has no such thread"));
        }
        result = values[source];
        break;
      }
      case Collective::ballot:
        result = ballot;
        break;
      default:
        if (fiber.which == Collective::match) result = 0;
        for (unsigned j = 0; j < warp.count; ++j) {
          if ((group >> j & 1) == 0) continue;
          const uint64_t other = values[j];
          const auto mine = static_cast<int64_t>(result), its = static_cast<int64_t>(other);
          if (fiber.which == Collective::match) result |= other == values[i] ? 1ull << j : 0;
          if (fiber.which == Collective::add && j != i) result += other;
          if (fiber.which == Collective::min) result = std::min(result, other);
          if (fiber.which == Collective::max) result = std::max(result, other);
          if (fiber.which == Collective::min_signed) result = static_cast<uint64_t>(std::min(mine, its));
          if (fiber.which == Collective::max_signed) result = static_cast<uint64_t>(std::max(mine, its));
          if (fiber.which == Collective::bit_and) result &= other;
          if (fiber.which == Collective::bit_or) result |= other;
          if (fiber.which == Collective::bit_xor && j != i) result ^= other;
        }
    }
    results[i] = result;
  }
  for (unsigned i = 0; i < warp.count; ++i) {
    if ((group >> i & 1) == 0) continue;
    warp.lane(i).value = results[i];
    warp.lane(i).state = State::ready;
  }
}

}  // namespace

bool waits_for_same(const Fiber& fiber, const Fiber& other) {
  return other.state == State::in_collective && other.which == fiber.which && other.mask == fiber.mask &&
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

uint64_t collective(Collective which, Site site, uint64_t mask, uint64_t value, int source) {
  if (mask != 0 && (mask >> current.lane & 1) == 0) {
    fail("calls %s with the mask %#llx, which does not have its own lane %d", text(site).c_str(),
         static_cast<unsigned long long>(mask), current.lane);
  }
  self->which = which;
  self->site = site;
  self->mask = mask;
  self->value = value;
  self->source = source;
  wait(State::in_collective);
  return self->value;
}

uint64_t active_lanes() { return collective(Collective::ballot, {"__activemask", "", 0}, 0, 1); }

}  // namespace emulator

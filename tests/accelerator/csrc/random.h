// Random numbers of the device "late".
//
// A generator is a seed and a count of draws. An operator that draws takes the next count at the call and gives its
// task a generator of the CPU's that is seeded by both: what it draws depends on the order of calls alone.
#pragma once

#include <ATen/core/Generator.h>

namespace late {

at::Generator make_generator(c10::DeviceIndex device);
const at::Generator& default_generator(c10::DeviceIndex device);
// The CPU's generator for the next draw of a generator of this device; of its default one if none is given.
at::Generator next_draw(c10::DeviceIndex device, const std::optional<at::Generator>& given);

}  // namespace late

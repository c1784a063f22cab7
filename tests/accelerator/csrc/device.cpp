// What torch asks of a device: its guard (devices, streams, events) and its hooks.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

#include "memory.h"
#include "random.h"
#include "streams.h"

namespace late {
namespace {

struct Event {
  std::shared_ptr<Mark> mark;  // the last recording
  c10::DeviceIndex device;
};

Event& event_of(void* event) { return *static_cast<Event*>(event); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kLate; }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(device_count()); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Device getDevice() const override { return {kLate, current_device()}; }
  c10::Device exchangeDevice(c10::Device device) const override { return {kLate, exchange_device(device.index())}; }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) exchange_device(device.index());
  }

  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override { return default_stream(device.index()); }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return new_stream(device.index(), priority);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_high_priority) const override {
    return new_stream(device.index(), is_high_priority ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override { return is_idle(stream); }
  void synchronizeStream(const c10::Stream& stream) const override { wait_for(key(stream), last_ticket(key(stream))); }
  void synchronizeDevice(c10::DeviceIndex device) const override { wait_for_device(device); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event{nullptr, stream.device_index()};
    auto& recorded = event_of(*event);
    TORCH_CHECK(recorded.device == stream.device_index(), "late: an event of device ", int(recorded.device),
                " cannot be recorded on a stream of device ", int(stream.device_index()));
    recorded.mark = put_mark(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) put_wait(stream, event_of(event).mark);
  }
  bool queryEvent(void* event) const override {
    return !event || !event_of(event).mark || is_reached(*event_of(event).mark);
  }
  void synchronizeEvent(void* event) const override {
    if (event && event_of(event).mark) wait_for(*event_of(event).mark);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {  // torch has asked both by now
    const auto passed = event_of(second).mark->reached_at - event_of(first).mark->reached_at;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_allocator().recordStream(pointer, stream);
  }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(device_count()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device() : exchange_device(device);
  }

  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator(); }
  at::Device getDeviceFromPtr(void* address) const override {
    const auto device = device_of(address);
    TORCH_CHECK(device, "late: an address that is no device's");
    return {kLate, *device};
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return make_generator(device); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t nbytes) const override {
    const c10::DeviceGuard guard(storage.device());
    auto made = device_allocator().allocate(nbytes);
    const std::size_t kept = std::min(nbytes, storage.nbytes());
    if (kept > 0) {
      put(current_stream(storage.device().index()), "resize",
          [to = real(made.get()), from = real(storage.data()), kept] { std::memcpy(to, from, kept); });
    }
    auto& changed = const_cast<c10::Storage&>(storage);
    changed.set_data_ptr_noswap(std::move(made));
    changed.set_nbytes(nbytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
const bool g_has_hooks = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(kLate, &device_allocator());
  at::setHostAllocator(kLate, &host_allocator());
  return true;
}();

}  // namespace
}  // namespace late

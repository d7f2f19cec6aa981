// A CUDA device that is not there: torch's CPU wheel creates, traces and compiles tensors "on" it; nothing can run.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
struct AbsentDevice : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device only() const { return Device(DeviceType::CUDA, 0); }
  Stream stream() const { return Stream(Stream::DEFAULT, only()); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return only(); }
  Device exchangeDevice(Device) const override { return only(); }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, AbsentDevice)
} // namespace c10::impl

namespace at {
struct CUDAHooks : CUDAHooksInterface { // the name under which ATen looks for it
  CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
} // namespace at

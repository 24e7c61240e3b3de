// aten operators of the emulated NPU: PyTorch's CPU kernels on the device's own memory.
//
// The emulated runtime makes device memory out of host memory, so that a tensor of the
// NPU (dispatch key PrivateUse1) can be seen as a CPU tensor without a copy. One boxed
// kernel serves every operator: see its arguments as CPU tensors, call the operator's
// CPU kernel, and give new results memory of the device. Calls are put on a tape while
// a graph is captured, and counted in a launch log; device.py and its neighbours use
// the C functions at the end.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

using torch::jit::Stack;

namespace {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;

bool is_npu(const at::Tensor &tensor)
{
    return tensor.defined() && tensor.device().type() == kNpu;
}

// The same memory as a CPU tensor, which keeps the NPU's tensor alive.
at::Tensor alias_on_host(const at::Tensor &tensor)
{
    if (!is_npu(tensor)) {
        return tensor;
    }
    auto options = tensor.options().device(at::kCPU).pinned_memory(false);
    if (tensor.numel() == 0) {
        return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    }
    auto owner = std::make_shared<at::Tensor>(tensor);
    return at::from_blob(const_cast<void *>(tensor.const_data_ptr()), tensor.sizes(),
                         tensor.strides(), [owner](void *) {}, options);
}

// A new tensor of the NPU with the content and, if it is dense, the strides of another.
at::Tensor copy_to_npu(const at::Tensor &tensor, c10::Device device)
{
    if (!tensor.defined()) {
        return tensor;
    }
    at::Tensor source =
        tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
    auto options = source.options().device(device).pinned_memory(false);
    at::Tensor result = at::empty_strided(source.sizes(), source.strides(), options);
    if (source.numel()) {
        std::memcpy(const_cast<void *>(result.const_data_ptr()),
                    source.const_data_ptr(), source.nbytes());
    }
    return result;
}

// One call's tensors of the NPU, each with the CPU tensor that stands for it.
class Aliases {
  public:
    at::Tensor see(const at::Tensor &tensor, bool is_written)
    {
        if (!is_npu(tensor)) {
            return tensor;
        }
        if (!device_) {
            device_ = tensor.device();
        }
        for (auto &alias : aliases_) {
            if (alias.npu.is_same(tensor)) {
                alias.is_written |= is_written;
                return alias.cpu;
            }
        }
        aliases_.push_back({tensor, alias_on_host(tensor), is_written});
        return aliases_.back().cpu;
    }

    // A written argument may have grown: `out=` arguments are resized by the kernel.
    void follow_resizes()
    {
        for (auto &alias : aliases_) {
            bool is_grown = alias.cpu.sizes() != alias.npu.sizes() ||
                            (alias.npu.numel() == 0 && alias.cpu.numel() != 0);
            if (!alias.is_written || !is_grown) {
                continue;
            }
            at::Tensor source = alias.cpu.contiguous();
            alias.npu.resize_(source.sizes());
            if (source.numel()) {
                std::memcpy(const_cast<void *>(alias.npu.const_data_ptr()),
                            source.const_data_ptr(), source.nbytes());
            }
        }
    }

    at::Tensor give_back(const at::Tensor &result) const
    {
        if (!result.defined()) {
            return result;
        }
        for (auto &alias : aliases_) {
            if (alias.cpu.is_same(result)) {
                return alias.npu;
            }
        }
        bool stays_on_cpu = wants_cpu_ || result.device().type() != at::kCPU;
        return stays_on_cpu ? result : copy_to_npu(result, device());
    }

    // `device=` arguments: the NPU's become the CPU, and results go to that NPU.
    c10::Device see(c10::Device device)
    {
        if (device.type() == kNpu) {
            device_ = device;
            return c10::Device(at::kCPU);
        }
        wants_cpu_ = true;
        return device;
    }

  private:
    struct Alias {
        at::Tensor npu, cpu;
        bool is_written;
    };

    c10::Device device() const
    {
        if (device_ && device_->has_index()) {
            return *device_;
        }
        return c10::impl::VirtualGuardImpl(kNpu).getDevice();
    }

    std::vector<Alias> aliases_;
    std::optional<c10::Device> device_;
    bool wants_cpu_ = false;
};

// The CPU generator with the seed of one of the NPU, which only real kernels can use.
// Kept with the one that it stands for, whose address nobody else can get then.
at::Generator host_generator(const at::Generator &npu)
{
    struct Pair {
        at::Generator npu, cpu;
        uint64_t seed;
    };
    static std::vector<Pair> pairs;
    uint64_t seed = npu.current_seed();
    for (auto &pair : pairs) {
        if (pair.npu == npu) {
            if (pair.seed != seed) {
                pair.seed = seed;
                pair.cpu.set_current_seed(seed);
            }
            return pair.cpu;
        }
    }
    pairs.push_back({npu, at::detail::createCPUGenerator(seed), seed});
    return pairs.back().cpu;
}

c10::IValue see(const c10::IValue &value, bool is_written, Aliases &aliases)
{
    if (value.isTensor()) {
        return aliases.see(value.toTensor(), is_written);
    }
    if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor &tensor : value.toTensorVector()) {
            list.push_back(aliases.see(tensor, is_written));
        }
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const std::optional<at::Tensor> &tensor : value.toOptionalTensorVector()) {
            list.push_back(tensor ? std::optional(aliases.see(*tensor, is_written))
                                  : std::nullopt);
        }
        return list;
    }
    if (value.isDevice()) {
        return aliases.see(value.toDevice());
    }
    if (value.isGenerator() && value.toGenerator().defined() &&
        value.toGenerator().device().type() == kNpu) {
        return host_generator(value.toGenerator());
    }
    return value;
}

c10::IValue give_back(const c10::IValue &value, const Aliases &aliases)
{
    if (value.isTensor()) {
        return aliases.give_back(value.toTensor());
    }
    if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor &tensor : value.toTensorVector()) {
            list.push_back(aliases.give_back(tensor));
        }
        return list;
    }
    return value;
}

// --- Running, recording and counting ---------------------------------------------

void run_on_host(const c10::OperatorHandle &op, Stack &stack)
{
    Aliases aliases;
    const auto &arguments = op.schema().arguments();
    size_t first = stack.size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); i++) {
        auto *alias_info = arguments[i].alias_info();
        bool is_written = alias_info && alias_info->isWrite();
        stack[first + i] = see(stack[first + i], is_written, aliases);
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    aliases.follow_resizes();
    size_t returns = op.schema().returns().size();
    for (size_t i = stack.size() - returns; i < stack.size(); i++) {
        stack[i] = give_back(stack[i], aliases);
    }
}

struct Call {
    c10::OperatorHandle op;
    std::vector<c10::IValue> arguments, results;
};

using Tape = std::vector<Call>;
using LaunchHook = void (*)(const char *name, const char *tensors);

Tape *recording = nullptr;        // calls go here, unless null
LaunchHook launch_hook = nullptr; // is told of each, unless null

void describe(const c10::IValue &value, std::ostringstream &json, bool &is_first)
{
    auto add = [&](const at::Tensor &tensor) {
        // A Python number among the arguments is none of the device's tensors.
        if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
            return;
        }
        json << (is_first ? "" : ",") << "[\"" << c10::toString(tensor.scalar_type())
             << "\",[";
        for (int64_t i = 0; i < tensor.dim(); i++) {
            json << (i ? "," : "") << tensor.size(i);
        }
        json << "]]";
        is_first = false;
    };
    if (value.isTensor()) {
        add(value.toTensor());
    } else if (value.isTensorList()) {
        for (const at::Tensor &tensor : value.toTensorVector()) {
            add(tensor);
        }
    }
}

void report_launch(const c10::OperatorHandle &op, c10::ArrayRef<c10::IValue> arguments)
{
    if (!launch_hook) {
        return;
    }
    std::ostringstream name, tensors;
    name << op.operator_name();
    bool is_first = true;
    tensors << "[";
    for (const auto &argument : arguments) {
        describe(argument, tensors, is_first);
    }
    tensors << "]";
    launch_hook(name.str().c_str(), tensors.str().c_str());
}

void call(const c10::OperatorHandle &op, c10::DispatchKeySet, Stack *stack)
{
    size_t count = op.schema().arguments().size();
    std::vector<c10::IValue> arguments(stack->end() - count, stack->end());
    report_launch(op, arguments);
    run_on_host(op, *stack);
    if (recording) {
        size_t returns = op.schema().returns().size();
        std::vector<c10::IValue> results(stack->end() - returns, stack->end());
        recording->push_back({op, std::move(arguments), std::move(results)});
    }
}

// What was computed anew goes where the graph's readers look for it.
void copy_result(const c10::IValue &to, const c10::IValue &from)
{
    auto copy = [](const at::Tensor &to, const at::Tensor &from) {
        if (!to.defined() || !from.defined() || to.is_same(from) || !to.numel()) {
            return;
        }
        if (to.const_data_ptr() != from.const_data_ptr()) {
            alias_on_host(to).copy_(alias_on_host(from));
        }
    };
    if (to.isTensor()) {
        copy(to.toTensor(), from.toTensor());
    } else if (to.isTensorList()) {
        auto old = to.toTensorVector(), now = from.toTensorVector();
        for (size_t i = 0; i < old.size(); i++) {
            copy(old[i], now[i]);
        }
    }
}

void replay(const Call &recorded)
{
    report_launch(recorded.op, recorded.arguments);
    Stack stack(recorded.arguments.begin(), recorded.arguments.end());
    run_on_host(recorded.op, stack);
    for (size_t i = 0; i < recorded.results.size(); i++) {
        copy_result(recorded.results[i], stack[i]);
    }
}

std::vector<std::unique_ptr<torch::Library>> libraries;

} // namespace

// --- For device.py ---------------------------------------------------------------

extern "C" {

// Serve an aten operator ("add.Tensor") on the NPU from here on; 0 if that worked.
int npu_emulator_override(const char *name)
{
    try {
        auto library = std::make_unique<torch::Library>(
            torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__,
            __LINE__);
        library->impl(name, torch::CppFunction::makeFromBoxedFunction<&call>());
        libraries.push_back(std::move(library));
        return 0;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "npu_emulator_override %s: %s\n", name, error.what());
        return 1;
    }
}

void npu_emulator_set_launch_hook(LaunchHook hook)
{
    launch_hook = hook;
}

void *npu_emulator_tape_new()
{
    return new Tape();
}

void npu_emulator_tape_free(void *tape)
{
    delete static_cast<Tape *>(tape);
}

// Calls are recorded on this tape from here on; on none if it is null.
void npu_emulator_record_on(void *tape)
{
    recording = static_cast<Tape *>(tape);
}

long npu_emulator_tape_length(void *tape)
{
    return static_cast<long>(static_cast<Tape *>(tape)->size());
}

// Run calls [first, last) of a tape on the memory that they were recorded on.
int npu_emulator_tape_replay(void *tape, long first, long last)
{
    at::InferenceMode guard;
    Tape *before = recording;
    recording = nullptr;
    int failed = 0;
    try {
        for (long i = first; i < last; i++) {
            replay(static_cast<Tape *>(tape)->at(i));
        }
    } catch (const std::exception &error) {
        std::fprintf(stderr, "npu_emulator_tape_replay: %s\n", error.what());
        failed = 1;
    }
    recording = before;
    return failed;
}
}

TORCH_LIBRARY_FRAGMENT(npu_emulator, library)
{
    library.def("alias_on_host(Tensor tensor) -> Tensor");
}

TORCH_LIBRARY_IMPL(npu_emulator, PrivateUse1, library)
{
    library.impl("alias_on_host", alias_on_host);
}

TORCH_LIBRARY_IMPL(npu_emulator, CPU, library)
{
    library.impl("alias_on_host", alias_on_host);
}

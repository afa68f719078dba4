#include "update.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa.h"
#include "page_order.h"
#include "summation.h"
#include "threads.h"

namespace colonnade {

namespace {

std::string number(std::int64_t n) {
  return std::to_string(n);
}
[[noreturn]] void refuse(const std::string& message) {
  throw std::invalid_argument("gradients: " + message);
}
[[noreturn]] void refuse_dtype(Dtype dtype) {
  refuse("dtype " + std::string(name_of(dtype)) + ", wanted float32 or float64");
}

const OptimizerKernel& optimizer_of_kind(std::int32_t kind, const std::string& subject) {
  const std::int32_t num_optimizers = kernels().num_optimizers;
  if (kind < 0 || kind >= num_optimizers)
    refuse(subject + " " + number(kind) + ", wanted 0 .. " + number(num_optimizers - 1));
  return *kernels().optimizers[kind];
}

OptimizerSettings checked_settings(std::int64_t p, SettingGroup group, std::span<const double> s) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto want = [&](const char* name, double value, bool is_right, const char* wanted) {
    if (!is_right)
      refuse("part " + number(p) + " has " + name + " " + std::to_string(value) + ", wanted " + wanted);
  };
  const auto want_amount = [&](const char* name, double value) {
    want(name, value, value >= 0 && value < kInfinity, "a finite number, 0 or more");
  };
  want_amount("lr", s[0]);
  want_amount("weight_decay", s[1]);
  want_amount("eps", s[2]);
  const auto want_decay = [&](const char* name, double value) {
    want(name, value, value >= 0 && value < 1, "0 .. 1, not 1");
  };
  switch (group) {
    case SettingGroup::common:
      break;
    case SettingGroup::momentum:
      want_decay("momentum", s[3]);
      break;
    case SettingGroup::moments:
      want_decay("beta1", s[3]);
      want_decay("beta2", s[4]);
      break;
    case SettingGroup::proximal:
      want("lr", s[0], s[0] > 0, "more than 0, because it is a divisor");
      want_amount("l1", s[6]);
      want_amount("l2", s[7]);
      want_amount("beta", s[8]);
      break;
  }
  want("max_norm", s[9], s[9] > 0, "more than 0, inf for none");
  want("clip_value", s[10], s[10] > 0, "more than 0, inf for none");
  want("weight_bound", s[11], s[11] > 0, "more than 0, inf for none");
  want("gradient_scale", s[12], std::isfinite(s[12]), "a finite number");
  return {.lr = s[0],
          .weight_decay = s[1],
          .eps = s[2],
          .beta1 = s[3],
          .beta2 = s[4],
          .l1 = s[6],
          .l2 = s[7],
          .beta = s[8],
          .max_norm = s[9],
          .clip_value = s[10],
          .weight_bound = s[11],
          .gradient_scale = s[12],
          .is_nesterov = s[5] != 0,
          .powers1 = nullptr,
          .powers2 = nullptr};
}

// 4 x 256: entry 256 * k + i is base^(i * 256^k), each the previous one times base^(256^k).
std::vector<double> powers_of(double base) {
  std::vector<double> powers;
  for (int level = 0; level < 4; ++level) {
    double power = 1;
    for (int i = 0; i < 256; ++i, power *= base) powers.push_back(power);
    base = power;
  }
  return powers;
}

}  // namespace

std::vector<std::string> optimizer_names() {
  std::vector<std::string> names;
  for (std::int32_t kind = 0; kind < kernels().num_optimizers; ++kind)
    names.emplace_back(kernels().optimizers[kind]->name);
  return names;
}

std::int64_t optimizer_state_elements(std::int32_t kind, std::int64_t dim) {
  return optimizer_of_kind(kind, "optimizer").state_elements(dim);
}

void sum_rows(const Segments& segments, const GradientSource& source, const Parts& parts, std::int64_t out,
              std::span<const std::uint32_t> out_index, Dtype dtype) {
  if (compute_dtype(dtype) != dtype) refuse_dtype(dtype);
  const Summation summation(segments, source, parts, dtype);
  if (static_cast<std::int64_t>(out_index.size()) != summation.num_rows()) {
    refuse("out_index has " + number(static_cast<std::int64_t>(out_index.size())) + " elements for " +
           number(summation.num_rows()) + " unique rows");
  }
  const auto kernel = dtype == Dtype::float32 ? kernels().float32.sum : kernels().float64.sum;
  summation.for_each_task([&](SumTask& task, std::int64_t p) {
    task.sums = reinterpret_cast<std::byte*>(out) + parts.all()[p].column * item_bytes(dtype);
    task.sum_index = out_index.data();
    kernel(task);
  });
}

void update(Dram& dram, std::span<const std::uint32_t> unordered_slots, const Segments& unordered_segments,
            const GradientSource& source, const Parts& parts, std::span<const std::int32_t> optimizers,
            std::span<const double> settings) {
  const Dtype dtype = compute_dtype(dram.dtype());
  const auto num_parts = static_cast<std::int64_t>(parts.all().size());
  if (parts.num_tables() != dram.num_tables()) {
    refuse("parts are of " + number(parts.num_tables()) + " tables, dram has " + number(dram.num_tables()));
  }
  for (std::int64_t t = 0; t < parts.num_tables(); ++t) {
    if (parts.width(t) != dram.layout(t).dim) {
      refuse("the parts of table " + number(t) + " have " + number(parts.width(t)) + " columns, its rows " +
             number(dram.layout(t).dim));
    }
  }
  const PageOrder order(unordered_slots, unordered_segments);
  const auto slots = order.slots();
  const Segments& segments = order.segments();
  const Summation summation(segments, source, parts, dtype);
  if (static_cast<std::int64_t>(optimizers.size()) != num_parts ||
      static_cast<std::int64_t>(settings.size()) != num_parts * kSettings) {
    refuse("optimizers and settings speak of " + number(static_cast<std::int64_t>(optimizers.size())) +
           " and " + number(static_cast<std::int64_t>(settings.size()) / kSettings) + " parts, parts of " +
           number(num_parts));
  }
  if (static_cast<std::int64_t>(slots.size()) != summation.num_rows()) {
    refuse(number(static_cast<std::int64_t>(slots.size())) + " slots for " + number(summation.num_rows()) +
           " unique rows");
  }
  std::map<double, std::vector<double>> powers;
  std::vector<UpdateTask> tasks;                     // by part: fields that all its runs share
  std::vector<void (*)(const UpdateTask&)> updates;  // by part
  for (std::int64_t t = 0; t < parts.num_tables(); ++t) {
    const RowLayout& layout = dram.layout(t);
    std::int64_t state_end = 0;
    for (std::int64_t p = parts.first(t); p < parts.first(t + 1); ++p) {
      const Part& part = parts.all()[p];
      const OptimizerKernel& optimizer =
          optimizer_of_kind(optimizers[p], "part " + number(p) + " has optimizer");
      updates.push_back(dtype == Dtype::float32 ? optimizer.update_float32 : optimizer.update_float64);
      UpdateTask task{};
      task.settings = checked_settings(p, optimizer.settings, settings.subspan(p * kSettings, kSettings));
      if (optimizer.settings == SettingGroup::moments) {
        const auto table = [&](double beta) {
          auto& values = powers[beta];
          if (values.empty()) values = powers_of(beta);
          return values.data();
        };
        task.settings.powers1 = table(task.settings.beta1);
        task.settings.powers2 = table(task.settings.beta2);
      }
      if (const auto wanted = optimizer.state_elements(part.dim)) {
        if (part.state < state_end || part.state + wanted > layout.state_elements) {
          refuse("part " + number(p) + " keeps " + number(wanted) + " state elements from " +
                 number(part.state) + " on, but they must follow those of the parts before, which end at " +
                 number(state_end) + ", and table " + number(t) + " has " + number(layout.state_elements));
        }
        state_end = part.state + wanted;
      }
      task.slots = slots.data();
      task.dtype = layout.dtype;
      task.is_split = layout.is_split;
      task.rows = layout.weights + part.column * item_bytes(layout.dtype);
      task.row_stride = layout.weights_stride;
      task.states = layout.states + part.state * item_bytes(dtype);
      task.state_stride = layout.state_stride;
      task.lows = layout.states + layout.lows_offset + 2 * part.column;
      task.clocks = layout.states + layout.clock_offset;
      task.is_last = p + 1 == parts.first(t + 1);
      task.column = layout.first_column + part.column;
      task.seed = layout.seed;
      task.ids = layout.ids;
      task.ids_stride = layout.ids_stride;
      task.num_owners = layout.num_owners;
      task.place = layout.place;
      tasks.push_back(task);
    }
    const auto capacity = static_cast<std::uint32_t>(dram.num_addresses(t));
    int strangers = 0;
    for (std::int64_t u = segments.table_offsets[t]; u < segments.table_offsets[t + 1]; ++u)
      strangers |= slots[u] >= capacity;
    if (strangers)
      refuse("a slot of table " + number(t) + " is not in 0 .. " +
             number(static_cast<std::int64_t>(capacity) - 1));
  }
  summation.for_each_task([&](const SumTask& sum, std::int64_t p) {
    UpdateTask task = tasks[p];
    task.sum = sum;
    updates[p](task);
  });
}

double squared_norm(const void* values, std::int64_t n, Dtype dtype) {
  constexpr std::int64_t kBlock = 1 << 16;
  if (n < 0) refuse("squared_norm of " + number(n) + " elements");
  if (compute_dtype(dtype) != dtype) refuse_dtype(dtype);
  std::vector<double> blocks(static_cast<std::size_t>((n + kBlock - 1) / kBlock));
  for_each_run(n, kBlock, [&](std::int64_t begin, std::int64_t end) {
    blocks[begin / kBlock] =
        dtype == Dtype::float32
            ? kernels().float32.squared_norm(static_cast<const float*>(values) + begin, end - begin)
            : kernels().float64.squared_norm(static_cast<const double*>(values) + begin, end - begin);
  });
  double sum = 0;
  for (const double block : blocks) sum += block;
  return sum;
}

}  // namespace colonnade

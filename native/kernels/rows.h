// What this folder's files offer each other, per instruction set. Each is instantiated where it is defined.
#pragma once

#include "convert.h"
#include "kernels.h"

namespace colonnade::COLONNADE_ISA {

template <class Row>
void pool(const PoolTask& task);
template <class T>
void sum(const SumTask& task);
template <class T>
void update_sgd(const SumTask& task);
template <class T>
void update_rowwise_adagrad(const SumTask& task);
template <class T>
void birth(const BirthTask& task, std::int64_t id, T* out);
template <class T>
bool all_finite(const T* values, std::int64_t n);

}  // namespace colonnade::COLONNADE_ISA

// What this folder's files offer each other, per instruction set. Each is instantiated where it is defined.
#pragma once

#include "kernels.h"

namespace colonnade::COLONNADE_ISA {

template <class T>
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
template <class T>
void dots(const DotsTask& task);
template <class T>
void dots_gradient(const DotsGradientTask& task);
template <class T>
void fm(const FMTask& task);
template <class T>
void fm_gradient(const FMGradientTask& task);
template <class T>
void cross(const CrossTask& task);
template <class T>
void cross_gradient(const CrossGradientTask& task);

}  // namespace colonnade::COLONNADE_ISA

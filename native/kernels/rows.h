// Functions that this folder's files share, per instruction set. Each is instantiated where it is defined.
#pragma once

#include "convert.h"
#include "kernels.h"

namespace colonnade::COLONNADE_ISA {

template <class Row>
void pool(const PoolTask& task);
template <class T>
void sum(const SumTask& task);
template <class T>
void initial_values(const InitialValuesTask& task, std::int64_t id, T* out);
void initial_values_bfloat16(const InitialValuesTask& task, std::int64_t id, std::uint16_t* out);
void initial_values_float16(const InitialValuesTask& task, std::int64_t id, std::uint16_t* out);
void initial_values_split(const InitialValuesTask& task, std::int64_t id, std::uint16_t* highs, std::uint16_t* lows);
template <class T>
bool all_finite(const T* values, std::int64_t n);
template <class T>
double squared_norm(const T* values, std::int64_t n);
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
template <class Row>
void pool_squares(const PoolSquaresTask& task);
template <class T>
void square_gradients(const SquareGradientTask& task);

}  // namespace colonnade::COLONNADE_ISA

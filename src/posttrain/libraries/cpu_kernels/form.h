// How the factors of products are multiplied: in float32, or pairs of bfloat16 at once where the processor can.
#pragma once

#include "lanes.h"

namespace {

// Numbers T of rows are multiplied STEP of the depth at a time, with as many of every column, side by side in memory.
template <class T>
struct Form {
    typedef float Factor;
    typedef Lanes Column;
    static constexpr int STEP = 1;

    static Column column(const float *from) { return load(from); }

    static Lanes add(Lanes sum, const float *row, Lanes column) { return sum + *row * column; }
};

#ifdef PAIRS
template <>
struct Form<bfloat16> {
    typedef bfloat16 Factor;
    typedef __m512i Column;
    static constexpr int STEP = 2;

    static Column column(const bfloat16 *from) { return _mm512_loadu_si512(from); }

    static Lanes add(Lanes sum, const bfloat16 *row, __m512i column) {
        uint32_t pair;
        std::memcpy(&pair, row, sizeof pair);
        return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)column);
    }
};
#endif

// Numbers of bfloat16 whose pairs are multiplied in float32: the second numbers first, as processors that multiply pairs do, so that
// the sums are those of Form<bfloat16> to the bit.
struct widened : bfloat16 {};

template <>
struct Form<widened> {
    typedef float Factor;
    typedef Words Column;
    static constexpr int STEP = 2;

    static Words column(const bfloat16 *from) {
        Words pairs;
        std::memcpy(&pairs, from, sizeof pairs);
        return pairs;
    }

    static Lanes add(Lanes sum, const float *row, Words column) {
        sum += row[1] * (Lanes)(column & 0xffff0000);
        return sum + row[0] * (Lanes)(column << 16);
    }
};

}  // namespace

// Keys and values of attention as whole numbers of 16 bits (int16.h), for processors on which pairs of bfloat16 are slow.
//
// A query and a key have one scale each. A value has one, too, and not one for every number of a head over several tokens: so what a
// query finds does not depend on later tokens. It is part of the weight, and the weights of SPAN keys have one scale.
#pragma once

#include "int16.h"

#include <limits>
#include <utility>

#ifndef __AVX512VNNI__
#undef FAST_INT16
#endif

#ifdef FAST_INT16

namespace {

#define ALL_AT_ONCE _Pragma("GCC unroll 8")  // or the sums of a product would not be in registers
constexpr int64_t MOST_OF_KEY = 1024;  // numbers
constexpr int64_t SPAN = 128;          // keys whose weights have one scale
constexpr float MOST_OF_VALUE = 8191;  // a value's largest magnitude as a whole number
// The largest sum of SPAN weights as whole numbers: times values, and with half a rounding error for each weight, it is less than 2^31.
constexpr float MOST_OF_WEIGHTS = 262000;

// What whole numbers are made with and undone by: one for each lane.
struct Scales {
    Lanes factor, scale;

    // Of vectors whose largest magnitudes, or more, are those of these bits: 0 for what is all but 0, NaN for what is not finite.
    static Scales of(Lanes factor, Words most) {
        Lanes none = {}, nan = NAN - none;
        Lanes scale = most < LEAST ? none : 1.0f / factor;
        return {(most < LEAST) | (most > FINITE) ? none : factor, most > FINITE ? nan : scale};
    }
};

// Of vectors of `width` numbers each, by their largest magnitudes and the sums of their squares.
inline Scales scales_of_vectors(Words most, Lanes squares, int64_t width) {
    Lanes top = (Lanes)most;
    // Squares that are too large or too small for float32 say nothing; no norm is larger than that of as many largest numbers.
    Lanes norm = (Lanes)_mm512_sqrt_ps((__m512)squares), at_most = std::sqrt(float(width)) * top;
    norm = (squares > 1e-30f) & (squares < 1e36f) ? norm : at_most;
    Lanes by_top = LARGEST / top, by_norm = TOP / norm;
    return Scales::of(by_top < by_norm ? by_top : by_norm, most);
}

inline __attribute__((always_inline)) Lanes magnitude(Lanes x) { return (Lanes)((Words)x & MAGNITUDE); }

// Of up to SPAN weights each, by the largest magnitude and the sum of all.
inline __attribute__((always_inline)) Scales scales_of_weights(Lanes most, Lanes all) {
    Lanes by_most = LARGEST / most, by_all = MOST_OF_WEIGHTS / all;
    return Scales::of(by_most < by_all ? by_most : by_all, (Words)all);
}

// Of one row's.
inline float factor_of_weights(float most, float all, float *scale) {
    if (!(all <= std::numeric_limits<float>::max())) return *scale = NAN, 0.0f;
    if (all < as_float(LEAST)) return *scale = 0, 0.0f;
    float factor = std::min(LARGEST / most, MOST_OF_WEIGHTS / all);
    *scale = 1 / factor;
    return factor;
}

// `count` weights, up to SPAN, times the scales of values. Returns: what undoes it.
inline float round_weights(const float *from, const float *scales, int64_t count, int16_t *to) {
    alignas(64) float kept[SPAN];
    Lanes most = {}, all = {};
    for (int64_t k = 0; k < count; k += LANES) {
        Lanes x = load(from + k) * load(scales + k), size = magnitude(x);
        most = size > most ? size : most, all += size;
        store(x, kept + k);
    }
    float scale, factor = factor_of_weights(greatest(most), sum(all), &scale);
    for (int64_t k = 0; k < count; k += LANES)
        _mm256_storeu_si256((__m256i *)(to + k), whole(load(kept + k) * factor));
    return scale;
}

// A vector's numbers as whole ones with a norm of at most TOP, with zeros up to `width`. Returns: their scale.
template <class T>
float round_vector(const T *from, int64_t count, int64_t width, int16_t *to) {
    Words most = {};
    Lanes squares = {};
    blocks(count, [&](int64_t i) { most = larger(most, load(from + i)); });
    for (int64_t i = 0; i < count; i += LANES) {
        Lanes x = i + LANES <= count ? load(from + i) : load_part(from + i, count - i);
        squares += x * x;
    }
    Scales found = scales_of_vectors(top_of(most) + Words{}, sum(squares) + Lanes{}, count);
    for (int64_t i = count; i < width; i++) to[i] = 0;
    blocks(count, [&](int64_t i) { _mm256_storeu_si256((__m256i *)(to + i), whole(load(from + i) * found.factor)); });
    return found.scale[0];
}

// sums[row][column] = the products of `depth` whole numbers of each of ROWS rows on the left, `left_row` apart and the next pair of
// them `left_step`, with as many of WIDE * LANES columns: LANES columns lie `apart` numbers from the next ones, and the next pair of
// the depth `further`.
template <int ROWS, int WIDE>
inline __attribute__((always_inline)) void multiply_pairs(
    const int16_t *left, int64_t left_row, int64_t left_step, const int16_t *right, int64_t apart, int64_t further, int64_t depth,
    __m512i (&sums)[ROWS][WIDE]) {
    ALL_AT_ONCE
    for (int row = 0; row < ROWS; row++)
        ALL_AT_ONCE
        for (int block = 0; block < WIDE; block++) sums[row][block] = _mm512_setzero_si512();
    for (int64_t k = 0; k < depth; k += 2, left += left_step, right += further) {
        __m512i columns[WIDE];
        ALL_AT_ONCE
        for (int block = 0; block < WIDE; block++) columns[block] = _mm512_loadu_si512(right + block * apart);
        ALL_AT_ONCE
        for (int row = 0; row < ROWS; row++) {
            int32_t pair;
            std::memcpy(&pair, left + row * left_row, sizeof pair);
            __m512i both = _mm512_set1_epi32(pair);
            ALL_AT_ONCE
            for (int block = 0; block < WIDE; block++) add_pairs(sums[row][block], both, columns[block]);
        }
    }
}

// Whole numbers of STEP = 2 numbers of LANES keys side by side, [room / LANES][width / 2][LANES][2], and of those of 2 values, [room /
// 2][dim][2], with a scale for each key and value. The first is that of token `first`. The width is the dim in whole pairs.
struct Rounded {
    int16_t *keys, *values;
    float *key_scales, *value_scales;
    int64_t dim, width, first;

    // LANES keys, whose numbers k and k + 1 pair(k) gives.
    template <class Pair>
    void put_keys(int64_t token, Pair pair) const {
        Words most = {};
        Lanes squares = {};
        for (int64_t k = 0; k < width; k += 2) {
            auto [one, other] = pair(k);
            most = larger(larger(most, one), other);
            squares += one * one + other * other;
        }
        Scales found = scales_of_vectors(most, squares, dim);
        store(found.scale, key_scales + token - first);
        int16_t *to = keys + (token - first) * width;
        for (int64_t k = 0; k < width; k += 2) {
            auto [one, other] = pair(k);
            _mm512_storeu_si512(to + k * LANES, pairs_of(one * found.factor, other * found.factor));
        }
    }

    // One key, whose numbers lie side by side.
    template <class T>
    void put_key(int64_t token, const T *key) const {
        int16_t *to = keys + (token - first) / LANES * LANES * width + (token - first) % LANES * 2;
        alignas(64) int16_t numbers[MOST_OF_KEY];
        key_scales[token - first] = round_vector(key, dim, width, numbers);
        for (int64_t k = 0; k < width; k += 2) std::memcpy(to + k * LANES, numbers + k, 2 * sizeof(int16_t));
    }

    // Values of `count` tokens from an even one on, an even number up to LANES: row(i) is where the numbers of the i-th begin.
    template <class Row>
    void put_values(int64_t token, int count, Row row) const {
        Words tops = {};
        for (int i = 0; i < count; i++) {
            Words most = {};
            blocks(dim, [&](int64_t k) { most = larger(most, load(row(i) + k)); });
            tops[i] = top_of(most);
        }
        Scales found = Scales::of(MOST_OF_VALUE / (Lanes)tops, tops);
        std::memcpy(value_scales + token - first, &found.scale, count * sizeof(float));
        int16_t *to = values + (token - first) * dim;
        for (int i = 0; i < count; i += 2, to += 2 * dim) {
            float factor = found.factor[i], next = found.factor[i + 1];
            auto *one = row(i), *other = row(i + 1);
            blocks(dim, [&](int64_t k) {
                _mm512_storeu_si512(to + 2 * k, pairs_of(load(one + k) * factor, load(other + k) * next));
            });
        }
    }

    // found[row][column] = the products of ROWS queries with WIDE * LANES keys from `key` on.
    template <int ROWS, int WIDE>
    inline __attribute__((always_inline)) void score(
        const int16_t *queries, const float *query_scales, int64_t key, Lanes (&found)[ROWS][WIDE]) const {
        __m512i sums[ROWS][WIDE];
        multiply_pairs<ROWS, WIDE>(queries, width, 2, keys + (key - first) * width, LANES * width, 2 * LANES, width, sums);
        ALL_AT_ONCE
        for (int block = 0; block < WIDE; block++) {
            Lanes scale = load(key_scales + key - first + block * LANES);
            ALL_AT_ONCE
            for (int row = 0; row < ROWS; row++)
                found[row][block] = (Lanes)_mm512_cvtepi32_ps(sums[row][block]) * (scale * query_scales[row]);
        }
    }

    // Adds to the numbers of ROWS rows, `sums_row` apart, the weighted values' WIDE * LANES numbers from `column` on, of up to SPAN
    // keys. Weights of rows are `weights_row` apart, and their scales `scales_row`.
    template <int ROWS, int WIDE>
    void mix(
        const int16_t *weights, int64_t weights_row, const float *weight_scales, int64_t scales_row, int64_t key, int64_t depth,
        int64_t column, float *of_rows, int64_t sums_row) const {
        __m512i sums[ROWS][WIDE];
        const int16_t *from = values + (key - first) * dim + column * 2;
        multiply_pairs<ROWS, WIDE>(weights, weights_row, 2, from, 2 * LANES, 2 * dim, depth, sums);
        ALL_AT_ONCE
        for (int row = 0; row < ROWS; row++)
            ALL_AT_ONCE
            for (int block = 0; block < WIDE; block++) {
                float *place = of_rows + row * sums_row + block * LANES;
                Lanes found = (Lanes)_mm512_cvtepi32_ps(sums[row][block]);
                store(load(place) + found * weight_scales[row * scales_row], place);
            }
    }
};

// Rounded keys and values of their own.
struct RoundedTokens {
    std::vector<Words> keys, values;  // whose places are whole lines of memory
    std::vector<float> key_scales, value_scales;

    // Room for `tokens`, a multiple of LANES.
    Rounded of(int64_t tokens, int64_t dim, int64_t first) {
        int64_t width = (dim + 1) / 2 * 2, words = sizeof(Words) / sizeof(int16_t);
        if (int64_t(key_scales.size()) < tokens) key_scales.resize(tokens), value_scales.resize(tokens);
        if (int64_t(keys.size()) < tokens * width / words) keys.resize(tokens * width / words), values.resize(tokens * width / words);
        return {(int16_t *)keys.data(), (int16_t *)values.data(), key_scales.data(), value_scales.data(), dim, width, first};
    }
};

}  // namespace
#endif

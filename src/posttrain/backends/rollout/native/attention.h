// Attention of a few queries over many keys, a chunk of keys at a time, with a softmax that is corrected as larger scores come
// (arXiv:2205.14135, algorithm 1). Queries that see the same keys are rows of one product: heads that share a key head, samples
// that share a prompt, neighbours in a prompt. What comes out for a query depends on its own keys only, to the bit: chunks begin
// at multiples of CHUNK, and every sum has the same order whatever else is in a product.
#pragma once

#include "lanes.h"

namespace {

constexpr int64_t CHUNK = 512;  // keys: theirs and their values' numbers fit into the second cache of a core
#define ALL_AT_ONCE _Pragma("GCC unroll 8")  // or the sums of a product would not be in registers
constexpr int TALL = 6, BROAD = 4;  // rows and LANES of a product that are in registers at a time

// Left factors of products whose right factors are T. Two rows of bfloat16 are multiplied at once where the processor can.
#ifdef PAIRS
template <class T>
struct Left {
    typedef T type;
};
#else
template <class T>
struct Left {
    typedef float type;
};
#endif

// sums[row][column] += the sum over `depth` of left[row][k] * right[k][column]
template <int ROWS, int WIDE, class T>
inline __attribute__((always_inline)) void multiply(
    const float *left, int64_t left_width, const T *right, int64_t right_width, int64_t depth, Lanes (&sums)[ROWS][WIDE]) {
    for (int64_t k = 0; k < depth; k++) {
        Lanes columns[WIDE];
        ALL_AT_ONCE
        for (int block = 0; block < WIDE; block++) columns[block] = load(right + k * right_width + block * LANES);
        ALL_AT_ONCE
        for (int row = 0; row < ROWS; row++)
            ALL_AT_ONCE
            for (int block = 0; block < WIDE; block++) sums[row][block] += left[row * left_width + k] * columns[block];
    }
}

#ifdef PAIRS
// Orders that let the numbers of two rows alternate: those of 2 * LANES columns become two vectors, LOW and HIGH.
alignas(64) constexpr uint16_t LOW[] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
alignas(64) constexpr uint16_t HIGH[] = {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                                         24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};

// The products of two rows with the next two numbers of every row on the left, or of the last row alone.
template <bool TWO, int ROWS, int WIDE>
inline __attribute__((always_inline)) void multiply_pair(
    const bfloat16 *left, int64_t left_width, const bfloat16 *first, const bfloat16 *second, __m512i low, __m512i high,
    Lanes (&sums)[ROWS][WIDE]) {
    __m512i columns[WIDE];
    if (WIDE == 1) {
        __m256i other = TWO ? _mm256_loadu_si256((const __m256i *)second) : _mm256_setzero_si256();
        __m512i one = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)first));
        columns[0] = _mm512_permutex2var_epi16(one, low, _mm512_castsi256_si512(other));
    } else {
        ALL_AT_ONCE
        for (int block = 0; block + 1 < WIDE; block += 2) {
            __m512i one = _mm512_loadu_si512(first + block * LANES);
            __m512i other = TWO ? _mm512_loadu_si512(second + block * LANES) : _mm512_setzero_si512();
            columns[block] = _mm512_permutex2var_epi16(one, low, other);
            columns[block + 1] = _mm512_permutex2var_epi16(one, high, other);
        }
    }
    ALL_AT_ONCE
    for (int row = 0; row < ROWS; row++) {
        uint32_t pair = 0;
        std::memcpy(&pair, left + row * left_width, TWO ? sizeof pair : sizeof(bfloat16));
        __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
        ALL_AT_ONCE
        for (int block = 0; block < WIDE; block++)
            sums[row][block] = (Lanes)_mm512_dpbf16_ps((__m512)sums[row][block], both, (__m512bh)columns[block]);
    }
}

template <int ROWS, int WIDE>
inline __attribute__((always_inline)) void multiply(
    const bfloat16 *left, int64_t left_width, const bfloat16 *right, int64_t right_width, int64_t depth,
    Lanes (&sums)[ROWS][WIDE]) {
    const __m512i low = _mm512_load_si512(LOW), high = _mm512_load_si512(HIGH);
    int64_t k = 0;
    for (; k + 1 < depth; k += 2, right += 2 * right_width)
        multiply_pair<true, ROWS, WIDE>(left + k, left_width, right, right + right_width, low, high, sums);
    if (k < depth) multiply_pair<false, ROWS, WIDE>(left + k, left_width, right, right, low, high, sums);
}
#endif

// Queries that see parts of the same keys, and what is known of their results.
template <class T>
struct Queries {
    typedef typename Left<T>::type Factor;

    int64_t dim, padded;  // numbers of a head, and in whole LANES
    float scaling, softcap;
    std::vector<Factor> queries;       // [count][dim]
    std::vector<int64_t> from, to;     // [count], the keys that each sees
    std::vector<float> most, total;    // [count], the largest score so far, and the sum of the weights
    std::vector<float> sums;           // [count][padded], of weighted values; the last LANES are those that end a head
    std::vector<float> scores;         // [TALL][CHUNK]
    std::vector<Factor> weights;       // [TALL][CHUNK]

    // Scores are products times `of_scores`, and then, for a cap that is not 0, cap * tanh(score / cap).
    void begin(int64_t count, int64_t head_dim, float of_scores, float cap) {
        dim = head_dim, padded = (dim + LANES - 1) / LANES * LANES, scaling = of_scores, softcap = cap;
        queries.resize(count * dim);
        from.resize(count), to.resize(count);
        most.assign(count, -INFINITY);
        total.assign(count, 0);
        sums.assign(count * padded, 0);
        scores.resize(TALL * CHUNK);
        weights.resize(TALL * CHUNK);
    }

    void put(int64_t row, const T *query) {
        blocks(dim, [&](int64_t i) { store(load(query + i), queries.data() + row * dim + i); });
    }

    // Over keys [dim][room] and values [room][dim], for the rows from `first` to `last`.
    void see(int64_t first, int64_t last, const T *keys, const T *values, int64_t room) {
        if (first == last) return;
        int64_t begin = *std::min_element(from.begin() + first, from.begin() + last) / CHUNK * CHUNK;
        int64_t end = *std::max_element(to.begin() + first, to.begin() + last);
        for (; begin < end; begin += CHUNK) {
            for (int64_t row = first; row < last; row += TALL) {
                switch (std::min<int64_t>(TALL, last - row)) {
                    case 1: see_chunk<1>(row, begin, keys, values, room); break;
                    case 2: see_chunk<2>(row, begin, keys, values, room); break;
                    case 3: see_chunk<3>(row, begin, keys, values, room); break;
                    case 4: see_chunk<4>(row, begin, keys, values, room); break;
                    case 5: see_chunk<5>(row, begin, keys, values, room); break;
                    case TALL: see_chunk<TALL>(row, begin, keys, values, room); break;
                }
            }
        }
    }

    void give(int64_t row, T *output) const {
        float share = 1 / total[row];
        for (int64_t i = 0; i < padded; i += LANES)
            store(load(sums.data() + row * padded + i) * share, output + std::min(i, dim - LANES));
    }

   private:
    template <int ROWS>
    void see_chunk(int64_t row, int64_t begin, const T *keys, const T *values, int64_t room) {
        int64_t end = std::min(begin + CHUNK, *std::max_element(to.begin() + row, to.begin() + row + ROWS));
        if (end <= std::max(begin, *std::min_element(from.begin() + row, from.begin() + row + ROWS))) return;
        int64_t width = (end - begin + LANES - 1) / LANES * LANES, first = 0;
        // Scores of keys behind the end are left out later: whole blocks cost less than narrow ones.
        for (; first < width && begin + first + BROAD * LANES <= room; first += BROAD * LANES)
            score<ROWS, BROAD>(row, keys + begin + first, room, first);
        for (; first < width; first += LANES) score<ROWS, 1>(row, keys + begin + first, room, first);
        for (int i = 0; i < ROWS; i++) weigh(row + i, i, begin, width);
        for (first = 0; first + BROAD * LANES <= dim; first += BROAD * LANES)
            mix<ROWS, BROAD>(row, values + begin * dim + first, end - begin, first);
        for (; first < dim; first += LANES)
            mix<ROWS, 1>(row, values + begin * dim + std::min(first, dim - LANES), end - begin, first);
    }

    template <int ROWS, int WIDE>
    void score(int64_t row, const T *keys, int64_t room, int64_t first) {
        Lanes found[ROWS][WIDE] = {};
        multiply<ROWS, WIDE>(queries.data() + row * dim, dim, keys, room, dim, found);
        ALL_AT_ONCE
        for (int i = 0; i < ROWS; i++)
            ALL_AT_ONCE
            for (int block = 0; block < WIDE; block++)
                store(found[i][block] * scaling, scores.data() + i * CHUNK + first + block * LANES);
    }

    template <int ROWS, int WIDE>
    void mix(int64_t row, const T *values, int64_t depth, int64_t first) {
        Lanes found[ROWS][WIDE];
        float *of_row = sums.data() + row * padded + first;
        ALL_AT_ONCE
        for (int i = 0; i < ROWS; i++)
            ALL_AT_ONCE
            for (int block = 0; block < WIDE; block++) found[i][block] = load(of_row + i * padded + block * LANES);
        multiply<ROWS, WIDE>(weights.data(), CHUNK, values, dim, depth, found);
        ALL_AT_ONCE
        for (int i = 0; i < ROWS; i++)
            ALL_AT_ONCE
            for (int block = 0; block < WIDE; block++) store(found[i][block], of_row + i * padded + block * LANES);
    }

    // The weights of the row's scores, which are those of line i; what was added up before is corrected for a larger score.
    void weigh(int64_t row, int i, int64_t begin, int64_t width) {
        float *line = scores.data() + i * CHUNK;
        Factor *weight = weights.data() + i * CHUNK;
        int64_t low = std::max<int64_t>(from[row] - begin, 0), high = std::min(to[row] - begin, width);
        if (high <= low) {
            std::memset((void *)weight, 0, width * sizeof(Factor));
            return;
        }
        if (softcap > 0)
            for (int64_t k = 0; k < width; k += LANES)
                store(hyperbolic_tangent(load(line + k) / softcap) * softcap, line + k);
        std::fill(line, line + low, -INFINITY);
        std::fill(line + high, line + width, -INFINITY);
        Lanes largest = load(line);
        for (int64_t k = LANES; k < width; k += LANES) {
            Lanes more = load(line + k);
            largest = more > largest ? more : largest;
        }
        float now = most[row];
        for (int lane = 0; lane < LANES; lane++) now = largest[lane] > now ? largest[lane] : now;
        if (now > most[row] && total[row] > 0) {
            float correction = exponential(most[row] - now - Lanes{})[0];
            total[row] *= correction;
            for (int64_t d = row * padded; d < (row + 1) * padded; d += LANES)
                store(load(sums.data() + d) * correction, sums.data() + d);
        }
        most[row] = now;
        Lanes added = {};
        for (int64_t k = 0; k < width; k += LANES) {
            Lanes of_keys = exponential(load(line + k) - now);
            added += of_keys;
            store(of_keys, weight + k);
        }
        total[row] += sum(added);
    }
};

}  // namespace

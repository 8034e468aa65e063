// Attention of a few queries over many keys, a chunk of keys at a time, with a softmax that is corrected as larger scores come
// (arXiv:2205.14135, algorithm 1). Queries that see the same keys are rows of one product: heads that share a key head, samples
// that share a prompt, neighbours in a prompt. What comes out for a query depends on its own keys only, to the bit: chunks begin
// at multiples of CHUNK, and every sum has the same order whatever else is in a product.
#pragma once

#include "form.h"
#include "rounded.h"

namespace {

constexpr int64_t CHUNK = 512;  // keys: theirs and their values' numbers fit into the second cache of a core
#define ALL_AT_ONCE _Pragma("GCC unroll 8")  // or the sums of a product would not be in registers
#ifdef FAST_INT16
template <class T>
constexpr bool ROUNDS = std::is_same<T, bfloat16>::value;  // where rows share keys, products are those of whole numbers
#else
template <class T>
constexpr bool ROUNDS = false;
#endif
constexpr int TALL = 6, BROAD = 4;  // rows and LANES of a product that are in registers at a time

// Keys [dim][room] and values [room][dim] of a prompt, as torch's products take them.
template <class T>
struct Flat {
    const T *keys, *values;
    int64_t room, dim;

    // sums[row][column] += the sum over the depth of left[row][k] * right[k][column], for WIDE * LANES columns
    template <int ROWS, int WIDE, class Factor>
    static inline __attribute__((always_inline)) void multiply(
        const Factor *left, int64_t left_width, const T *right, int64_t right_width, int64_t depth, Lanes (&sums)[ROWS][WIDE]) {
        int64_t k = 0;
#ifdef PAIRS
        if constexpr (std::is_same<T, bfloat16>::value) {
            const __m512i low = _mm512_load_si512(LOW), high = _mm512_load_si512(HIGH);
            for (; k + 1 < depth; k += 2)
                multiply_pair<true>(left + k, left_width, right + k * right_width, right_width, low, high, sums);
            if (k < depth) multiply_pair<false>(left + k, left_width, right + k * right_width, 0, low, high, sums);
            return;
        }
#endif
        for (; k < depth; k++) {
            Lanes columns[WIDE];
            ALL_AT_ONCE
            for (int block = 0; block < WIDE; block++) columns[block] = load(right + k * right_width + block * LANES);
            ALL_AT_ONCE
            for (int row = 0; row < ROWS; row++)
                ALL_AT_ONCE
                for (int block = 0; block < WIDE; block++)
                    sums[row][block] += *(const float *)(left + row * left_width + k) * columns[block];
        }
    }

    template <int ROWS, int WIDE, class Factor>
    inline __attribute__((always_inline)) void score(
        const Factor *queries, int64_t width, int64_t key, Lanes (&sums)[ROWS][WIDE]) const {
        multiply(queries, width, keys + key, room, dim, sums);
    }

    template <int ROWS, int WIDE, class Factor>
    inline __attribute__((always_inline)) void mix(
        const Factor *weights, int64_t width, int64_t key, int64_t depth, int64_t column, Lanes (&sums)[ROWS][WIDE]) const {
        multiply(weights, width, values + key * dim + column, dim, depth, sums);
    }

#ifdef FAST_INT16
    // Of tokens from `first`, a multiple of LANES, to `last`. There is room for LANES keys wherever one is.
    void round(int64_t first, int64_t last, const Rounded &to) const {
        const std::vector<T> none(dim);
        for (int64_t token = first; token < last; token += LANES)
            to.put_keys(token, [&](int64_t k) {
                const T *place = keys + k * room + token;
                return std::pair<Lanes, Lanes>(load(place), k + 1 < dim ? load(place + room) : Lanes{});
            });
        for (int64_t token = first; token < last; token += LANES)
            to.put_values(token, LANES, [&](int i) { return token + i < last ? values + (token + i) * dim : none.data(); });
    }
#endif

   private:
#ifdef PAIRS
    // Orders that let the numbers of two rows alternate: those of 2 * LANES columns become two vectors, LOW and HIGH.
    alignas(64) static constexpr uint16_t LOW[] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                   8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    alignas(64) static constexpr uint16_t HIGH[] = {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                                                    24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};

    // The products of two rows with the next two numbers of every row on the left, or of the last row alone.
    template <bool TWO, int ROWS, int WIDE>
    static inline __attribute__((always_inline)) void multiply_pair(
        const bfloat16 *left, int64_t left_width, const bfloat16 *right, int64_t right_width, __m512i low, __m512i high,
        Lanes (&sums)[ROWS][WIDE]) {
        __m512i columns[WIDE];
        ALL_AT_ONCE
        for (int block = 0; block + 1 < WIDE; block += 2) {
            __m512i one = _mm512_loadu_si512(right + block * LANES);
            __m512i other = TWO ? _mm512_loadu_si512(right + right_width + block * LANES) : _mm512_setzero_si512();
            columns[block] = _mm512_permutex2var_epi16(one, low, other);
            columns[block + 1] = _mm512_permutex2var_epi16(one, high, other);
        }
        if (WIDE % 2) {
            const bfloat16 *last = right + (WIDE - 1) * LANES;
            __m256i other = TWO ? _mm256_loadu_si256((const __m256i *)(last + right_width)) : _mm256_setzero_si256();
            __m512i one = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)last));
            columns[WIDE - 1] = _mm512_permutex2var_epi16(one, low, _mm512_castsi256_si512(other));
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
#endif
};

// sums[row][column] += the sum over the depth of left[row][k] * right[k][column], for WIDE * LANES columns. The rows on the left lie
// `left_row` numbers apart, and the next STEP of their depth `left_step`; on the right LANES columns lie `apart` numbers from the
// next ones, and the next STEP of the depth `further`. What lies at `next` is fetched meanwhile.
template <class T, int ROWS, int WIDE, class Factor, class Right>
inline __attribute__((always_inline)) void multiply_tiles(
    const Factor *left, int64_t left_row, int64_t left_step, const Right *right, const Right *next, int64_t apart, int64_t further,
    int64_t depth, Lanes (&sums)[ROWS][WIDE]) {
    constexpr int STEP = Form<T>::STEP;
    for (int64_t k = 0; k < depth; k += STEP, left += left_step, right += further, next += further) {
        typename Form<T>::Column columns[WIDE];
        ALL_AT_ONCE
        for (int block = 0; block < WIDE; block++) {
            // Stored numbers may be narrower than factors.
            if constexpr (STEP == 1)
                columns[block] = load(right + block * apart);
            else
                columns[block] = Form<T>::column(right + block * apart);
            __builtin_prefetch(next + block * apart, 0, 2);
        }
        ALL_AT_ONCE
        for (int row = 0; row < ROWS; row++)
            ALL_AT_ONCE
            for (int block = 0; block < WIDE; block++)
                sums[row][block] = Form<T>::add(sums[row][block], left + row * left_row, columns[block]);
    }
}

// Keys and values of a response in the order in which they are read: STEP numbers of LANES keys side by side, [room / LANES]
// [width / STEP][LANES][STEP], and those of STEP tokens, [room / STEP][dim][STEP]. The width is the dim in whole STEPs, with 0
// behind it; where a token has no successor yet, the numbers beside its own are 0, too.
template <class T>
struct Tiled {
    static constexpr int STEP = Form<T>::STEP;
    T *keys, *values;
    int64_t dim, width;
    const T *next_keys, *next_values;  // of another response, which are fetched meanwhile

    void put(int64_t place, const T *key, const T *value) const {
        T *of_key = keys + place / LANES * LANES * width + place % LANES * STEP;
        for (int64_t k = 0; k < width; k += STEP) std::memcpy((void *)(of_key + k * LANES), key + k, STEP * sizeof(T));
        T *of_value = values + place / STEP * STEP * dim;
        if constexpr (STEP == 1) {
            std::memcpy((void *)of_value, value, dim * sizeof(T));
        } else {
            uint32_t *pairs = (uint32_t *)of_value;
            const uint16_t *bits = (const uint16_t *)value;
            if (place % STEP)
                for (int64_t i = 0; i < dim; i++) pairs[i] = (pairs[i] & 0xffff) | uint32_t(bits[i]) << 16;
            else
                for (int64_t i = 0; i < dim; i++) pairs[i] = bits[i];
        }
    }

    template <int ROWS, int WIDE, class Factor>
    inline __attribute__((always_inline)) void score(
        const Factor *queries, int64_t queries_width, int64_t key, Lanes (&sums)[ROWS][WIDE]) const {
        int64_t at = key * width;
        multiply_tiles<T>(queries, queries_width, STEP, keys + at, next_keys + at, LANES * width, LANES * STEP, width, sums);
    }

    template <int ROWS, int WIDE, class Factor>
    inline __attribute__((always_inline)) void mix(
        const Factor *weights, int64_t weights_width, int64_t key, int64_t depth, int64_t column,
        Lanes (&sums)[ROWS][WIDE]) const {
        int64_t at = key * dim + column * STEP;
        multiply_tiles<T>(weights, weights_width, STEP, values + at, next_values + at, LANES * STEP, dim * STEP, depth, sums);
    }
};

// Queries that see parts of the same keys, and what is known of their results.
template <class T>
struct Queries {
    typedef typename Form<T>::Factor Factor;

    int64_t dim, width, padded;  // numbers of a head, and in whole STEPs and LANES
    float scaling, softcap;
    std::vector<Factor> queries;       // [count][width]
    std::vector<int64_t> from, to;     // [count], the keys that each sees
    std::vector<float> most, total;    // [count], the largest score so far, and the sum of the weights
    std::vector<float> sums;           // [count][padded], of weighted values; the last LANES are those that end a head
    std::vector<float> scores;         // [TALL][CHUNK]
    std::vector<Factor> weights;       // [TALL][CHUNK]
#ifdef FAST_INT16
    int64_t rounded_width;                                  // in whole pairs
    std::vector<int16_t> rounded_queries, rounded_weights;  // [count][rounded_width], [TALL][CHUNK]
    std::vector<float> query_scales, weight_scales;         // [count], [TALL][CHUNK / SPAN]
    RoundedTokens rounded_tokens;                           // of a chunk
#endif

    // Scores are products times `of_scores`, and then, for a cap that is not 0, cap * tanh(score / cap).
    void begin(int64_t count, int64_t head_dim, float of_scores, float cap) {
        constexpr int STEP = Form<T>::STEP;
        dim = head_dim, width = (dim + STEP - 1) / STEP * STEP, padded = (dim + LANES - 1) / LANES * LANES;
        scaling = of_scores, softcap = cap;
        queries.resize(count * width);
        from.resize(count), to.resize(count);
        most.assign(count, -INFINITY);
        total.assign(count, 0);
        sums.assign(count * padded, 0);
        scores.resize(TALL * CHUNK);
        weights.resize(TALL * CHUNK);
#ifdef FAST_INT16
        if constexpr (ROUNDS<T>) {
            rounded_width = (dim + 1) / 2 * 2;
            rounded_queries.resize(count * rounded_width), query_scales.resize(count);
            rounded_weights.resize(TALL * CHUNK), weight_scales.resize(TALL * CHUNK / SPAN);
        }
#endif
    }

    void put(int64_t row, const T *query) {
        Factor *to = queries.data() + row * width;
        if (width > dim) to[dim] = Factor{};
        blocks(dim, [&](int64_t i) { store(load(query + i), to + i); });
#ifdef FAST_INT16
        if constexpr (ROUNDS<T>)
            query_scales[row] = round_vector(query, dim, rounded_width, &rounded_queries[row * rounded_width]);
#endif
    }

    // Over keys and values in one of the forms, for the rows from `first` to `last`.
    template <class Past>
    void see(int64_t first, int64_t last, const Past &past) {
        each_chunk(first, last, [&](int64_t begin, int64_t) { see_groups(first, last, begin, past); });
    }

    // Over those that many rows share: where products of whole numbers are faster, they are rounded first.
    void see_shared(int64_t first, int64_t last, const Flat<T> &past) {
#ifdef FAST_INT16
        if constexpr (ROUNDS<T>)
            return each_chunk(first, last, [&](int64_t begin, int64_t end) {
                Rounded chunk = rounded_tokens.of(CHUNK, dim, begin);
                past.round(begin, std::min(begin + CHUNK, end), chunk);
                see_groups(first, last, begin, chunk);
            });
#endif
        see(first, last, past);
    }

    // Let a score that no key has take its share of the weights.
    void sink(int64_t row, float score) {
        float now = std::max(most[row], score), correction = exponential(most[row] - now - Lanes{})[0];
        total[row] = total[row] * correction + exponential(score - now - Lanes{})[0];
        for (int64_t d = row * padded; d < (row + 1) * padded; d += LANES)
            store(load(sums.data() + d) * correction, sums.data() + d);
        most[row] = now;
    }

    // The log of the sum of e^score.
    float log_total(int64_t row) const { return most[row] + std::log(total[row]); }

    void give(int64_t row, T *output) const {
        float share = 1 / total[row];
        for (int64_t i = 0; i < padded; i += LANES)
            store(load(sums.data() + row * padded + i) * share, output + std::min(i, dim - LANES));
    }

   private:
    // Calls work(first key, end of all) for every CHUNK of keys.
    template <class Work>
    void each_chunk(int64_t first, int64_t last, Work work) {
        if (first == last) return;
        int64_t begin = *std::min_element(from.begin() + first, from.begin() + last) / CHUNK * CHUNK;
        int64_t end = *std::max_element(to.begin() + first, to.begin() + last);
        for (; begin < end; begin += CHUNK) work(begin, end);
    }

    template <class Past>
    void see_groups(int64_t first, int64_t last, int64_t begin, const Past &past) {
        int64_t count = last - first, groups = (count + TALL - 1) / TALL;
        for (int64_t group = 0; group < groups; group++) {
            int64_t row = count * group / groups;
            see_rows(count * (group + 1) / groups - row, first + row, begin, past);
        }
    }

    template <int ROWS = TALL, class Past>
    void see_rows(int64_t rows, int64_t row, int64_t begin, const Past &past) {
        if constexpr (ROWS > 1)
            if (rows < ROWS) return see_rows<ROWS - 1>(rows, row, begin, past);
        see_chunk<ROWS>(row, begin, past);
    }

    template <int ROWS, class Past>
    void see_chunk(int64_t row, int64_t begin, const Past &past) {
        int64_t end = std::min(begin + CHUNK, *std::max_element(to.begin() + row, to.begin() + row + ROWS));
        if (end <= std::max(begin, *std::min_element(from.begin() + row, from.begin() + row + ROWS))) return;
        // Scores of keys behind the end are left out later: whole LANES cost less than parts.
        int64_t blocks = (end - begin + LANES - 1) / LANES, block = 0;
        for (; block + BROAD <= blocks; block += BROAD) score<ROWS, BROAD>(row, past, begin, block);
        switch (blocks - block) {
            case 3: score<ROWS, 3>(row, past, begin, block); break;
            case 2: score<ROWS, 2>(row, past, begin, block); break;
            case 1: score<ROWS, 1>(row, past, begin, block); break;
        }
        for (int i = 0; i < ROWS; i++) weigh(row + i, i, begin, blocks * LANES, past);
        int64_t first = 0;
        for (; first + BROAD * LANES <= dim; first += BROAD * LANES)
            mix<ROWS, BROAD>(row, past, begin, end - begin, first, first);
        for (; first + 2 * LANES <= dim; first += 2 * LANES)
            mix<ROWS, 2>(row, past, begin, end - begin, first, first);
        for (; first < dim; first += LANES)
            mix<ROWS, 1>(row, past, begin, end - begin, first, std::min(first, dim - LANES));
    }

    template <int ROWS, int WIDE, class Past>
    void score(int64_t row, const Past &past, int64_t begin, int64_t block) {
        Lanes found[ROWS][WIDE] = {};
        multiply(row, past, begin + block * LANES, found);
        ALL_AT_ONCE
        for (int i = 0; i < ROWS; i++)
            ALL_AT_ONCE
            for (int next = 0; next < WIDE; next++)
                store(found[i][next] * scaling, scores.data() + i * CHUNK + (block + next) * LANES);
    }

    template <int ROWS, int WIDE, class Past>
    inline __attribute__((always_inline)) void multiply(
        int64_t row, const Past &past, int64_t key, Lanes (&found)[ROWS][WIDE]) const {
        past.score(queries.data() + row * width, width, key, found);
    }

#ifdef FAST_INT16
    template <int ROWS, int WIDE>
    inline __attribute__((always_inline)) void multiply(
        int64_t row, const Rounded &past, int64_t key, Lanes (&found)[ROWS][WIDE]) const {
        past.score(&rounded_queries[row * rounded_width], &query_scales[row], key, found);
    }
#endif

    // The weighted values' numbers from `column` on, whose sums are those from `first` on.
    template <int ROWS, int WIDE, class Past>
    void mix(int64_t row, const Past &past, int64_t begin, int64_t depth, int64_t first, int64_t column) {
        Lanes found[ROWS][WIDE];
        float *of_row = sums.data() + row * padded + first;
        ALL_AT_ONCE
        for (int i = 0; i < ROWS; i++)
            ALL_AT_ONCE
            for (int block = 0; block < WIDE; block++) found[i][block] = load(of_row + i * padded + block * LANES);
        past.mix(weights.data(), CHUNK, begin, depth, column, found);
        ALL_AT_ONCE
        for (int i = 0; i < ROWS; i++)
            ALL_AT_ONCE
            for (int block = 0; block < WIDE; block++) store(found[i][block], of_row + i * padded + block * LANES);
    }

#ifdef FAST_INT16
    template <int ROWS, int WIDE>
    void mix(int64_t row, const Rounded &past, int64_t begin, int64_t depth, int64_t first, int64_t column) {
        float *of_row = sums.data() + row * padded + first;
        for (int64_t k = 0; k < depth; k += SPAN)
            past.mix<ROWS, WIDE>(
                &rounded_weights[k], CHUNK, &weight_scales[k / SPAN], CHUNK / SPAN, begin + k, std::min(SPAN, depth - k), column, of_row,
                padded);
    }
#endif

    // The weights of the row's scores, which are those of line i; what was added up before is corrected for a larger score.
    template <class Past>
    void weigh(int64_t row, int i, int64_t begin, int64_t count, const Past &past) {
        float *line = scores.data() + i * CHUNK;
        int64_t low = std::max<int64_t>(from[row] - begin, 0), high = std::min(to[row] - begin, count);
        if (high <= low) return no_weights(i, count, past);
        Lanes largest = -INFINITY - Lanes{};
        for (int64_t k = 0; k < count; k += LANES) {
            Lanes some = load(line + k);
            if (softcap > 0) some = hyperbolic_tangent(some / softcap) * softcap;
            if (k < low || k + LANES > high) some = between(some, low - k, high - k, -INFINITY);
            store(some, line + k);
            largest = some > largest ? some : largest;
        }
        float now = std::max(most[row], greatest(largest));
        if (now > most[row] && total[row] > 0) {
            float correction = exponential(most[row] - now - Lanes{})[0];
            total[row] *= correction;
            for (int64_t d = row * padded; d < (row + 1) * padded; d += LANES)
                store(load(sums.data() + d) * correction, sums.data() + d);
        }
        most[row] = now;
        total[row] += sum(set_weights(i, begin, count, now, past));
    }

    template <class Past>
    void no_weights(int i, int64_t count, const Past &) {
        std::memset((void *)(weights.data() + i * CHUNK), 0, count * sizeof(Factor));
    }

    // Weights of line i, whose keys begin at `begin`, for the largest score. Returns: their sum, in parts.
    template <class Past>
    Lanes set_weights(int i, int64_t, int64_t count, float now, const Past &) {
        const float *line = scores.data() + i * CHUNK;
        Lanes added = {};
        for (int64_t k = 0; k < count; k += LANES) {
            Lanes of_keys = exponential(load(line + k) - now);
            added += of_keys;
            store(of_keys, weights.data() + i * CHUNK + k);
        }
        return added;
    }

#ifdef FAST_INT16
    void no_weights(int i, int64_t count, const Rounded &) {
        std::memset(rounded_weights.data() + i * CHUNK, 0, count * sizeof(int16_t));
        std::fill_n(weight_scales.data() + i * CHUNK / SPAN, (count + SPAN - 1) / SPAN, 0.0f);
    }

    Lanes set_weights(int i, int64_t begin, int64_t count, float now, const Rounded &past) {
        const float *value_scales = past.value_scales + begin - past.first;
        float *line = scores.data() + i * CHUNK;
        Lanes added = {};
        for (int64_t from = 0; from < count; from += SPAN) {
            int64_t end = std::min(from + SPAN, count);
            Lanes most = {}, all = {};
            for (int64_t k = from; k < end; k += LANES) {
                Lanes of_keys = exponential(load(line + k) - now), scaled = of_keys * load(value_scales + k);
                added += of_keys, all += scaled;
                most = scaled > most ? scaled : most;
                store(scaled, line + k);
            }
            float factor = factor_of_weights(greatest(most), sum(all), &weight_scales[(i * CHUNK + from) / SPAN]);
            for (int64_t k = from; k < end; k += LANES)
                _mm256_storeu_si256((__m256i *)(rounded_weights.data() + i * CHUNK + k), whole(load(line + k) * factor));
        }
        return added;
    }
#endif
};

}  // namespace

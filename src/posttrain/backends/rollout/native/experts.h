// Experts of a mixture: each multiplies the rows that were sent to it, together.
#pragma once

#include "rows.h"

namespace {

// Arguments of a product and its function, as products.cpp has them.
struct Product {
    const void *x, *packed;
    const float *scales, *biases;
    int64_t inputs, outputs;
    void *y;
};
typedef void (*Multiply)(const Product *arguments, int64_t rows, int threads);

// A row goes to `each` experts of [rows][each]; their results are added up times their shares, in float32.
struct Experts {
    const void *x;
    void *y;
    const int64_t *chosen;
    const float *shares;
    const Product *first, *last;           // of each expert
    void *given, *both, *between, *found;  // room for [rows * each] rows of every width
    Multiply multiply;
    int64_t hidden, width, each, experts, kind;
    float slope, limit;
};

template <class T>
void mix_experts(const Experts &all, int64_t rows, int threads) {
    int64_t hidden = all.hidden, width = all.width, each = all.each, entries = rows * each;
    T *given = (T *)all.given, *both = (T *)all.both, *between = (T *)all.between, *found = (T *)all.found;
    std::vector<int64_t> begins(all.experts + 1), places(entries);  // the first entry of an expert; the place of an entry
    for (int64_t entry = 0; entry < entries; entry++) begins[all.chosen[entry] + 1]++;
    for (int64_t expert = 0; expert < all.experts; expert++) begins[expert + 1] += begins[expert];
    std::vector<int64_t> next(begins);
    for (int64_t entry = 0; entry < entries; entry++) places[entry] = next[all.chosen[entry]]++;
#pragma omp parallel for num_threads(threads) if (entries >= MANY_ROWS)
    for (int64_t entry = 0; entry < entries; entry++)
        std::memcpy(
            (void *)(given + places[entry] * hidden), (const T *)all.x + entry / each * hidden, hidden * sizeof(T));
    for (int64_t expert = 0; expert < all.experts; expert++) {
        int64_t begin = begins[expert], count = begins[expert + 1] - begin;
        if (!count) continue;
        Product first = all.first[expert], last = all.last[expert];
        first.x = given + begin * hidden, first.y = both + begin * 2 * width;
        all.multiply(&first, count, threads);
        gated<T>({first.y, between + begin * width, width, all.kind, all.slope, all.limit}, count, threads);
        last.x = between + begin * width, last.y = found + begin * hidden;
        all.multiply(&last, count, threads);
    }
#pragma omp parallel for num_threads(threads) if (rows >= MANY_ROWS)
    for (int64_t row = 0; row < rows; row++) {
        T *to = (T *)all.y + row * hidden;
        blocks(hidden, [&](int64_t i) {
            Lanes total = {};
            for (int64_t entry = row * each; entry < (row + 1) * each; entry++)
                total += load(found + places[entry] * hidden + i) * all.shares[entry];
            store(total, to + i);
        });
    }
}

}  // namespace

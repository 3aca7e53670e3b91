// Shared by all of the page's C: no library, one growing heap.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;

#define EXPORT(name) __attribute__((export_name(#name)))

// `take` allocates at the end of the heap; `heap_reset` frees all that was taken since `heap_mark`.
void *take(u32 bytes);
u32 heap_mark(void);
void heap_reset(u32 mark);

// Decoders return 1 if they wrote exactly `size` bytes and used exactly `length`, else 0.
int decode_brotli(const u8 *from, u32 length, u8 *to, u32 size);
int decode_zstd(const u8 *from, u32 length, u8 *to, u32 size);
int decode_lzma2(const u8 *from, u32 length, u8 *to, u32 size);

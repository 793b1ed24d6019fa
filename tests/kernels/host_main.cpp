// Runs recorded launches of rope.cu on a CPU. Built by host.py with a list of variants, each a copy
// of the source under its own macros; reads launches from one file, writes buffers to another.
#include "host_cuda.h"

#include "variants.inc"  // defines kKernels: {run, size of Params} of each variant's two kernels

namespace {

FILE* open_file(const char* path, const char* mode) {
  FILE* file = fopen(path, mode);
  if (!file) host::fail(path);
  return file;
}

void read(FILE* file, void* to, size_t bytes) {
  if (fread(to, 1, bytes, file) != bytes) host::fail("the input file ends early");
}

int64_t read_number(FILE* file) {
  int64_t x;
  read(file, &x, sizeof x);
  return x;
}

// Exactly `bytes` long, so that the sanitizer sees one byte too many.
struct Buffer {
  char* base;
  int64_t bytes;
};

}  // namespace

int main(int, char** arguments) {
  FILE* in = open_file(arguments[1], "rb");
  FILE* out = open_file(arguments[2], "wb");
  for (int64_t launches = read_number(in); launches > 0; --launches) {
    const Kernel& kernel = kKernels[read_number(in)];
    unsigned size[4];
    for (unsigned& n : size) n = static_cast<unsigned>(read_number(in));
    std::vector<char> params(read_number(in));
    if (params.size() != kernel.params_bytes) host::fail("Params has another size than in Python");
    read(in, params.data(), params.size());

    std::vector<Buffer> buffers(read_number(in));
    for (Buffer& buffer : buffers) {
      buffer.bytes = read_number(in);
      buffer.base = static_cast<char*>(malloc(buffer.bytes));
      read(in, buffer.base, buffer.bytes);
    }
    for (int64_t patches = read_number(in); patches > 0; --patches) {
      const int64_t word = read_number(in), buffer = read_number(in), offset = read_number(in);
      const char* address = buffers[buffer].base + offset;
      memcpy(params.data() + 8 * word, &address, sizeof address);
    }
    kernel.run(params.data(), {size[0], size[1], size[2]}, size[3]);
    for (const Buffer& buffer : buffers) {
      fwrite(buffer.base, 1, buffer.bytes, out);
      free(buffer.base);
    }
  }
  fclose(in);
  fclose(out);
  return 0;
}

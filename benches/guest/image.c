/* The init of the image benchmark's guest: mounts the EROFS image on the device that the kernel's command
 * line names (`image=/dev/vda`), with DAX where that is memory, and reads its file `read` by the page, by
 * calls and by a mapping. It writes a line after each step, the first one with the guest's free memory
 * in KiB. Built with `gcc -static`. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#define PAGE 4096

static char buffer[64 << 10] __attribute__((aligned(PAGE)));

static void say(const char *text)
{
    if (write(1, text, strlen(text)) < 0)
        _exit(1);
}

static void fail(const char *text)
{
    say(text);
    _exit(1);
}

int main(void)
{
    const char *device = getenv("image");
    struct sysinfo info;
    struct stat file;
    char line[64];
    unsigned sum = 0;
    int fd;

    if (!device)
        fail("no image\n");
    mount("dev", "/dev", "devtmpfs", 0, NULL);
    sysinfo(&info);
    snprintf(line, sizeof(line), "up %lu\n", info.freeram / 1024 * info.mem_unit);
    say(line);
    mkdir("/image", 0755);
    if (mount(device, "/image", "erofs", MS_RDONLY, strstr(device, "pmem") ? "dax=always" : ""))
        fail("the image cannot be mounted\n");
    say("mounted\n");
    fd = open("/image/read", O_RDONLY);
    if (fd < 0 || fstat(fd, &file) || read(fd, buffer, PAGE) != PAGE)
        fail("the file cannot be read\n");
    say("first\n");
    lseek(fd, 0, SEEK_SET);
    while (read(fd, buffer, sizeof(buffer)) > 0)
        sum += (unsigned char)buffer[0];
    say("read\n");
    const volatile char *bytes = mmap(NULL, (size_t)file.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (bytes == MAP_FAILED)
        fail("the file cannot be mapped\n");
    for (off_t at = 0; at < file.st_size; at += PAGE)
        sum += (unsigned char)bytes[at];
    snprintf(line, sizeof(line), "mapped %u\n", sum);
    say(line);
    for (;;)
        pause();
}

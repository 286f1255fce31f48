# The init of the boot benchmark's guest: says on the console that it runs, and sleeps.
# Built with `gcc -static -nostdlib`; the harness waits for the line below.

    .globl _start
_start:
    mov $1, %eax            # write(1, line, length)
    mov $1, %edi
    lea line(%rip), %rsi
    mov $length, %edx
    syscall
1:  mov $34, %eax           # pause()
    syscall
    jmp 1b

    .section .rodata
line:
    .ascii "init\n"
    .set length, . - line

    .section .note.GNU-stack, "", @progbits

//! Reads a console for what tells how far a boot is: the loader's lines, the first output of the
//! guest's system, and a prompt. All of it is a guest's word.

/// What each line of the loader has.
const LOADER: &str = "podvisor-loader: ";

/// Bytes of a line of the loader that are looked at: it writes no longer ones.
const MAX_LINE: usize = 4096 + 64;

/// Bytes of a line that may be a prompt.
const MAX_PROMPT: usize = 128;

/// What was seen.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Seen<'a> {
    /// The first line of the loader.
    Loader,
    /// The entry that it starts.
    Entry { title: &'a str, config: &'a str },
    /// The entry's files.
    Kernel { kernel: &'a str, initramfs: &'a str },
    /// The entry's command line, with what was added.
    Cmdline(&'a str),
    /// The loader starts the kernel.
    Handed,
    /// The first output of the guest's system.
    Output,
    /// The console asks for a login or a command.
    Prompt,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The loader is to come.
    BeforeLoader,
    /// The loader has written a line.
    Loader,
    /// The guest's system is to come.
    BeforeGuest,
    /// It has written something.
    Guest,
    Over,
}

/// The line that is written.
#[derive(Debug)]
pub(super) struct BootLines {
    stage: Stage,
    line: Vec<u8>,
}

impl BootLines {
    /// Begins before the loader's first line, or before the guest's.
    pub(super) fn new(has_loader: bool) -> Self {
        Self {
            stage: match has_loader {
                true => Stage::BeforeLoader,
                false => Stage::BeforeGuest,
            },
            line: Vec::new(),
        }
    }

    /// Whether nothing more is looked for.
    pub(super) fn are_over(&self) -> bool {
        self.stage == Stage::Over
    }

    /// Reads what the console says next.
    pub(super) fn read(&mut self, bytes: &[u8], mut tell: impl FnMut(Seen<'_>)) {
        for &byte in bytes {
            match self.stage {
                Stage::BeforeLoader | Stage::Loader => self.of_loader(byte, &mut tell),
                Stage::BeforeGuest | Stage::Guest => self.of_guest(byte, &mut tell),
                Stage::Over => return,
            }
        }
    }

    fn of_loader(&mut self, byte: u8, tell: &mut impl FnMut(Seen<'_>)) {
        if byte != b'\n' {
            if self.line.len() < MAX_LINE {
                self.line.push(byte);
            }
            return;
        }
        let line = std::mem::take(&mut self.line);
        let text = String::from_utf8_lossy(&line);
        // The kernel's last words may be before it.
        let Some((_, said)) = text.split_once(LOADER) else {
            return;
        };
        if self.stage == Stage::BeforeLoader {
            self.stage = Stage::Loader;
            tell(Seen::Loader);
        }
        let said = said.trim_end();
        if let Some(entry) = said.strip_prefix("entry \"") {
            if let Some((title, config)) = entry.rsplit_once("\" (") {
                let config = config.strip_suffix(')').unwrap_or(config);
                tell(Seen::Entry { title, config });
            }
        } else if let Some(files) = said.strip_prefix("kernel ") {
            if let Some((kernel, initramfs)) = files.split_once(", initial file system ") {
                tell(Seen::Kernel { kernel, initramfs });
            }
        } else if let Some(line) = said.strip_prefix("command line: ") {
            tell(Seen::Cmdline(line));
        } else if said.starts_with("starting the kernel at ") {
            self.stage = Stage::BeforeGuest;
            tell(Seen::Handed);
        }
    }

    fn of_guest(&mut self, byte: u8, tell: &mut impl FnMut(Seen<'_>)) {
        if self.stage == Stage::BeforeGuest && !byte.is_ascii_control() {
            self.stage = Stage::Guest;
            tell(Seen::Output);
        }
        if matches!(byte, b'\n' | b'\r') {
            self.line.clear();
        } else if self.line.len() <= MAX_PROMPT {
            self.line.push(byte);
        }
        if byte == b' ' && is_prompt(&self.line) {
            self.stage = Stage::Over;
            self.line = Vec::new();
            tell(Seen::Prompt);
        }
    }
}

/// Whether a line that is not ended asks for a login (`web login: `) or for a command, as shells
/// do: `/ # `, `user@web:~$ `, `[root@web ~]# `. That is a guess, which a line of a log may match.
fn is_prompt(line: &[u8]) -> bool {
    let Ok(line) = std::str::from_utf8(line) else {
        return false;
    };
    if line.len() > MAX_PROMPT {
        return false;
    }
    // Colours, and what sets a terminal's title.
    let plain = line.rsplit('\u{7}').next().unwrap_or(line);
    let mut words = plain.split_whitespace();
    let last = words.next_back().unwrap_or_default();
    let is_word = |word: &str| !word.ends_with([':', ',', '.']);
    match last {
        "login:" => words.count() == 1,
        last => {
            let last = last.strip_suffix("\u{1b}[0m").unwrap_or(last);
            let is_shell = last.ends_with(['#', '$']);
            is_shell && words.next().is_none_or(is_word) && words.next().is_none()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(has_loader: bool, text: &str, size: usize) -> Vec<String> {
        let mut lines = BootLines::new(has_loader);
        let mut seen = Vec::new();
        for piece in text.as_bytes().chunks(size) {
            lines.read(piece, |what| seen.push(format!("{what:?}")));
        }
        seen
    }

    #[test]
    fn a_boot_by_the_loader_is_followed_in_pieces_of_any_size() {
        let text = "[    0.1] vda: vda1\r\n\
                    podvisor-loader: disk vda (serial \"root\")\r\n\
                    podvisor-loader: entry \"A \\\"b\\\" (c)\" (grub.cfg in /grub.cfg on vda1)\r\n\
                    podvisor-loader: kernel /vmlinuz on vda1 (1.0 MiB), initial file system none \
                    (0 bytes)\r\n\
                    podvisor-loader: command line: root=/dev/vda1 ro\r\n\
                    podvisor-loader: starting the kernel at 0.210 s (entry found)\r\n\
                    \r\nWelcome\r\npodvisor-loader: command line: forged\r\n\
                    web login: podvisor (automatic login)\r\npodvisor@web:~$ ";
        let expected = [
            "Loader",
            r#"Entry { title: "A \\\"b\\\" (c)", config: "grub.cfg in /grub.cfg on vda1" }"#,
            r#"Kernel { kernel: "/vmlinuz on vda1 (1.0 MiB)", initramfs: "none (0 bytes)" }"#,
            r#"Cmdline("root=/dev/vda1 ro")"#,
            "Handed",
            "Output",
            "Prompt",
        ];
        for size in [1, 3, 64, 10_000] {
            assert_eq!(seen(true, text, size), expected, "{size}");
        }
        assert_eq!(seen(false, "\r\n\0", 1), [""; 0]);
        assert_eq!(seen(false, "x\n/ # ", 1), ["Output", "Prompt"]);
    }

    #[test]
    fn only_a_short_line_that_is_not_ended_is_a_prompt() {
        for prompt in [
            "/ # ",
            "# ",
            "$ ",
            "debian login: ",
            "user@web:~$ ",
            "[root@web ~]# ",
            "\u{1b}]0;title\u{7}user@web:~$ ",
        ] {
            assert!(is_prompt(prompt.as_bytes()), "{prompt:?}");
        }
        for other in [
            "login: ",
            "[    0.1] a line of a kernel # ",
            "Password: ",
            "last login: yesterday ",
            "a: # ",
            " ",
            &format!("{}# ", "x".repeat(MAX_PROMPT)),
        ] {
            assert!(!is_prompt(other.as_bytes()), "{other:?}");
        }
    }

    #[test]
    fn a_console_without_lines_is_read_in_bounded_memory() {
        for has_loader in [true, false] {
            let mut lines = BootLines::new(has_loader);
            for _ in 0..100 {
                lines.read(&[b'x'; 1000], |_| {});
            }
            assert!(lines.line.len() <= MAX_LINE);
        }
    }
}

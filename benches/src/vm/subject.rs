//! What is measured: the files, each monitor's arguments, and a machine that runs.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use super::Args;
use crate::boot::{Kind, Running, Sample, Stage, take};
use crate::qemu::{self, Boot};

/// The line that the system writes when it is up.
const READY: &str = "small: ready";

/// What its shell is asked, and a part of its answer that is not in the question.
const QUESTION: &[u8] = b"echo it is $((40+2))\n";
const ANSWER: &str = "it is 42";

/// The loader's command line.
const LOADER: &str = "console=ttyS0 quiet panic=-1 reboot=k -- --no-self-tests --root root";

/// What a kept kernel is started with besides.
const OF_KEPT: &str = "cryptomgr.notests";

/// The UUID of the root file system of the small system.
const ROOT: &str = "root=UUID=";

/// The files that are measured, in memory.
#[derive(Debug)]
pub(super) struct Files {
    podvisor: PathBuf,
    loader: [PathBuf; 2],
    kernel: PathBuf,
    initramfs: PathBuf,
    image: PathBuf,
    root: String,
    directory: PathBuf,
}

/// A monitor, and what it runs.
#[derive(Debug)]
pub(super) struct Subject {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    /// What its disk is a copy of.
    pub(super) disk: PathBuf,
    /// The system is up already.
    pub(super) is_booted: bool,
    program: PathBuf,
    arguments: Vec<String>,
}

/// A machine that was booted, and its disk.
#[derive(Debug)]
pub(super) struct Booted {
    snapshot: PathBuf,
    disk: PathBuf,
}

/// A machine that runs.
pub(super) struct Machine {
    process: Running,
    console: BufReader<ChildStdout>,
    began: Instant,
    messages: PathBuf,
}

impl Files {
    pub(super) fn stage(args: &Args, stage: &Stage) -> Result<Self> {
        let of_system = |name: &str| stage.copy(&args.system.join(name));
        let image = of_system("small.raw")?;
        Ok(Self {
            podvisor: stage.copy(&args.podvisor)?,
            loader: [
                stage.copy(&args.loader_kernel)?,
                stage.copy(&args.loader_initramfs)?,
            ],
            kernel: of_system("vmlinuz")?,
            initramfs: of_system("initrd.img")?,
            root: root_of(&image)?,
            image,
            directory: stage.path().to_owned(),
        })
    }

    /// The disk of the machine that runs.
    pub(super) fn disk(&self) -> PathBuf {
        self.directory.join("disk.raw")
    }

    pub(super) fn messages(&self) -> PathBuf {
        self.directory.join("stderr")
    }

    /// The command line of the system's kernel.
    fn cmdline(&self) -> String {
        format!("{} ro quiet console=ttyS0", self.root)
    }

    fn by_podvisor(&self, name: &'static str, words: &[String]) -> Subject {
        Subject {
            name,
            kind: Kind::Podvisor,
            disk: self.image.clone(),
            is_booted: false,
            program: self.podvisor.clone(),
            arguments: words.to_vec(),
        }
    }

    fn by_qemu(
        &self,
        name: &'static str,
        program: &Path,
        memory_mib: u64,
        command_line: &str,
    ) -> Subject {
        let boot = Boot {
            kernel: &self.kernel,
            initramfs: &self.initramfs,
            memory_mib,
            command_line,
        };
        let mut arguments = qemu::arguments(qemu::Q35, &boot);
        let drive = format!("if=none,id=root,format=raw,file={}", text(&self.disk()));
        let more = [
            "-drive",
            &drive,
            "-device",
            "virtio-blk-pci,drive=root,disable-legacy=on",
            "-device",
            "virtio-rng-pci,disable-legacy=on",
            "-device",
            "virtio-balloon-pci,disable-legacy=on",
            "-device",
            "virtio-serial-pci,disable-legacy=on",
            // Its other end is there, as podvisor's is; that of `null` would not be.
            "-chardev",
            "file,id=agent,path=/dev/null",
            "-device",
            "virtserialport,chardev=agent,name=org.qemu.guest_agent.0",
        ];
        arguments.extend(more.map(str::to_owned));
        Subject {
            name,
            kind: Kind::Qemu,
            disk: self.image.clone(),
            is_booted: false,
            program: program.to_owned(),
            arguments,
        }
    }

    fn boot(&self, kernel: &Path, initramfs: &Path, cmdline: &str, memory: u64) -> Vec<String> {
        vec![
            "boot".to_owned(),
            text(kernel),
            text(initramfs),
            format!("{memory}MiB"),
            cmdline.to_owned(),
            text(&self.disk()),
        ]
    }

    /// Boots a machine, and leaves a snapshot of it with its disk.
    pub(super) fn snapshot(&self, args: &Args) -> Result<Booted> {
        let [kernel, initramfs] = &self.loader;
        let booted = Booted {
            snapshot: self.directory.join("snapshot"),
            disk: self.directory.join("booted.raw"),
        };
        fs::copy(&self.image, self.disk())?;
        let mut words = self.boot(kernel, initramfs, LOADER, args.memory);
        words.push(text(&booted.snapshot));
        let subject = self.by_podvisor("podvisor", &words);
        let mut machine = subject.start(self.messages())?;
        machine.answers(false)?;
        // The end of its input.
        drop(machine.process.0.stdin.take());
        machine
            .reads("saved")
            .context("the snapshot was not made")?;
        fs::rename(self.disk(), &booted.disk)?;
        Ok(booted)
    }

    /// Returns what is measured.
    pub(super) fn subjects(&self, args: &Args, booted: &Booted) -> Result<Vec<Subject>> {
        let memory = args.memory;
        let [loader, loader_initramfs] = &self.loader;
        let (kernel, initramfs, cmdline) = (&self.kernel, &self.initramfs, self.cmdline());
        let by_loader = self.boot(loader, loader_initramfs, LOADER, memory);
        let direct = self.boot(kernel, initramfs, &cmdline, memory);
        let kept = self.boot(kernel, initramfs, &format!("{cmdline} {OF_KEPT}"), memory);
        let clone = [
            "clone".to_owned(),
            text(&booted.snapshot),
            text(&self.disk()),
        ];
        let mut subjects = vec![
            self.by_podvisor(super::report::LOADER, &by_loader),
            self.by_podvisor(super::report::KEPT, &kept),
            self.by_podvisor(super::report::DIRECT, &direct),
            Subject {
                disk: booted.disk.clone(),
                is_booted: true,
                ..self.by_podvisor(super::report::CLONE, &clone)
            },
        ];
        if let Some(program) = &args.qemu {
            let likewise = format!("{cmdline} {OF_KEPT}");
            for (name, cmdline) in [
                (super::report::QEMU, &cmdline),
                (super::report::QEMU_LIKEWISE, &likewise),
            ] {
                subjects.push(self.by_qemu(name, program, memory, cmdline));
            }
        }
        if let Some(program) = &args.cloud_hypervisor {
            let words = [
                "--kernel",
                &text(kernel),
                "--initramfs",
                &text(initramfs),
                "--cmdline",
                &cmdline,
                "--cpus",
                "boot=1",
                "--memory",
                &format!("size={memory}M,thp=on"),
                "--disk",
                &format!("path={}", text(&self.disk())),
                "--console",
                "off",
                "--serial",
                "tty",
            ];
            subjects.push(Subject {
                name: "Cloud Hypervisor",
                kind: Kind::CloudHypervisor,
                disk: self.image.clone(),
                is_booted: false,
                program: program.clone(),
                arguments: words.map(str::to_owned).into(),
            });
        }
        Ok(subjects)
    }
}

impl Subject {
    /// Starts it, with its serial port on stdin and stdout.
    pub(super) fn start(&self, messages: PathBuf) -> Result<Machine> {
        let began = Instant::now();
        let mut process = Running(
            Command::new(&self.program)
                .args(&self.arguments)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(File::create(&messages)?)
                .spawn()
                .with_context(|| format!("{} cannot be started", self.program.display()))?,
        );
        let stdout = process.0.stdout.take().context("stdout was not kept")?;
        Ok(Machine {
            process,
            console: BufReader::new(stdout),
            began,
            messages,
        })
    }
}

impl Machine {
    /// Waits until the system's shell has answered.
    pub(super) fn answers(&mut self, is_booted: bool) -> Result<()> {
        if !is_booted {
            self.reads(READY)?;
        }
        let stdin = self.process.0.stdin.as_mut();
        stdin.context("stdin was not kept")?.write_all(QUESTION)?;
        self.reads(ANSWER)
    }

    /// Reads the console up to a line with this text.
    fn reads(&mut self, text: &str) -> Result<()> {
        let mut last = String::new();
        loop {
            let mut line = Vec::new();
            if self.console.read_until(b'\n', &mut line)? == 0 {
                let messages = fs::read_to_string(&self.messages).unwrap_or_default();
                bail!(
                    "it ended before {text:?}; its last line: {}; its messages: {}",
                    last.trim(),
                    messages.trim()
                );
            }
            last = String::from_utf8_lossy(&line).into_owned();
            if last.contains(text) {
                return Ok(());
            }
        }
    }

    /// Samples the CPU time of its threads, and its memory.
    pub(super) fn sample(&self, kind: Kind, memory: u64) -> Result<Sample> {
        take(self.process.0.id(), kind, memory, self.began.elapsed())
    }
}

/// Returns how a kernel is told the root of the small system: by its UUID, which is in its menu.
fn root_of(image: &Path) -> Result<String> {
    let bytes = fs::read(image)?;
    let at = bytes.windows(ROOT.len());
    let at = at.enumerate().find(|(_, part)| *part == ROOT.as_bytes());
    let (at, _) = at.context("the small system's disk has no boot menu")?;
    let word = bytes.get(at..at + ROOT.len() + 36).unwrap_or_default();
    Ok(String::from_utf8_lossy(word).into_owned())
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_is_found_in_the_menu_of_a_disk() {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk");
        let uuid = "01234567-89ab-cdef-0123-456789abcdef";
        fs::write(&disk, format!("\0\0 linux /k root=UUID={uuid} ro quiet\n")).unwrap();
        assert_eq!(root_of(&disk).unwrap(), format!("root=UUID={uuid}"));
        fs::write(&disk, "nothing").unwrap();
        root_of(&disk).unwrap_err();
    }
}

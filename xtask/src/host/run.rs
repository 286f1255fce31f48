//! Runs one command in the test host: QEMU, the streams between it and this program, and the time
//! limits after which a hanging host is killed.
//!
//! Every stream is a virtio-serial port on a unix socket: `status` sends `up` when the command
//! starts and `rc=N` when it has ended, which is acknowledged; `stdout`, `stderr` and `stdin` are
//! the command's; with a terminal, `hvc0` is both directions and `size` carries new window sizes.
//! The command itself is in a small cpio archive appended to the initramfs.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal};
use signal_hook::consts::SIGWINCH;
use signal_hook::iterator::Signals;

use super::build::Image;
use super::{disk, qemu};
use crate::paths;
use crate::process::{Group, RawTerminal, TempDir};

/// A host boots in 3 to 5 s; on a heavily loaded machine in a minute. One whose console had no new
/// message for this long hangs.
const BOOT_LIMIT: Duration = Duration::from_secs(120);

/// How long a host may take to power off after its command has ended.
const POWER_OFF_LIMIT: Duration = Duration::from_secs(20);

/// How long the status may be in transit after the host has ended.
const STATUS_LIMIT: Duration = Duration::from_secs(2);

/// Interval of a host's heartbeat.
const PULSE: Duration = Duration::from_secs(10);

/// A host without a heartbeat for this long hangs.
const PULSE_LIMIT: Duration = Duration::from_secs(180);

/// A command, and the machine for it.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub(crate) command: Vec<String>,
    pub(crate) environment: Vec<(String, String)>,
    pub(crate) directory: PathBuf,
    /// Shared read-write, at the same paths.
    pub(crate) shares: Vec<PathBuf>,
    /// Copied to memory before the command runs, at the same paths.
    pub(crate) copies: Vec<PathBuf>,
    pub(crate) terminal: bool,
    pub(crate) stdin: bool,
    pub(crate) network: bool,
    pub(crate) icount: bool,
    pub(crate) cpus: u32,
    pub(crate) memory: String,
    pub(crate) limit: Duration,
    /// Keep the host's kernel messages here.
    pub(crate) log: Option<PathBuf>,
}

/// How a host ended.
#[derive(Debug)]
pub(crate) enum HostExit {
    /// The command ended with this status.
    Status(u8),
    /// The command never started.
    BootHang,
    /// The command was still running when the limit was reached.
    TimeLimit,
    /// The machine itself hung.
    Hang,
}

/// Runs `job` to completion.
pub(crate) fn run(image: &Image, job: &Job) -> Result<HostExit> {
    let directory = TempDir::new("host")?;
    let dir = directory.path();
    let initramfs = dir.join("initramfs.cpio");
    write_initramfs(image, job, &initramfs)?;
    // Machines that stall where a guest waits for a disk have none.
    let disk = (!job.icount).then(|| dir.join("disk"));
    if let Some(disk) = &disk {
        disk::make(disk)?;
    }

    let (events, received) = channel();
    let mut streams = vec!["status"];
    if job.terminal {
        streams.extend(["hvc", "size"]);
    } else {
        streams.extend(["stdout", "stderr"]);
        if job.stdin {
            streams.push("stdin");
        }
    }
    let raw = job.terminal.then(RawTerminal::enter).transpose()?;
    let mut stdin = None;
    for name in &streams {
        let path = dir.join(name);
        let listener = UnixListener::bind(&path)
            .with_context(|| format!("the socket {} cannot be made", path.display()))?;
        match *name {
            "stdin" => stdin = Some(listener),
            name => serve(name, listener, events.clone()),
        }
    }

    let mut command = qemu::command(job.icount);
    command
        .args(machine(image, job, dir, &initramfs, &streams))
        .args(disk.iter().flat_map(|disk| disk::arguments(disk)))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(fs::File::create(dir.join("qemu.log"))?);
    let mut qemu = Group::spawn(&mut command)?;
    let pid = qemu.pid();
    let ended = std::thread::scope(|scope| {
        scope.spawn(move || {
            let status = qemu.wait();
            drop(qemu);
            let _ = events.send(Event::Exit(status.ok()));
        });
        watch(job, dir, pid, &received, stdin)
    });
    drop(raw);
    if let Some(log) = &job.log {
        let _ = fs::copy(dir.join("console.log"), log);
    }
    ended.or_else(|failure| explain(failure, dir))
}

/// The reason why a host returned no status, unless it hung.
#[derive(Debug)]
enum Failure {
    /// QEMU exited by itself.
    Died(Option<ExitStatus>),
    /// The reader of this program's output has closed its end.
    OutputClosed,
}

fn explain(failure: Failure, dir: &Path) -> Result<HostExit> {
    let status = match failure {
        // As a shell reports a program that died of SIGPIPE.
        Failure::OutputClosed => return Ok(HostExit::Status(141)),
        Failure::Died(status) => status,
    };
    let mut text = String::new();
    for (file, lines) in [("qemu.log", 5), ("console.log", 15)] {
        let bytes = fs::read(dir.join(file)).unwrap_or_default();
        let log = String::from_utf8_lossy(&bytes);
        let log: Vec<&str> = log
            .lines()
            .filter(|line| !line.contains("TCG doesn't support requested feature"))
            .collect();
        for line in log.iter().skip(log.len().saturating_sub(lines)) {
            text.push_str("\n  ");
            text.push_str(line.trim_end());
        }
    }
    let status = status.map_or_else(|| "unknown status".to_owned(), |s| s.to_string());
    bail!("the test host ended before its command did (QEMU: {status}){text}")
}

#[derive(Debug)]
enum Event {
    Up,
    Alive,
    Returned(u8),
    StreamEnded,
    OutputClosed,
    Exit(Option<ExitStatus>),
}

/// Waits for the host's end, and kills it after its time limits.
fn watch(
    job: &Job,
    dir: &Path,
    qemu: Pid,
    events: &Receiver<Event>,
    mut stdin: Option<UnixListener>,
) -> Result<HostExit, Failure> {
    let began = Instant::now();
    let mut deadline = began + BOOT_LIMIT.min(job.limit);
    let mut up = false;
    let mut printed = 0;
    let mut pulse: Option<Instant> = None;
    let mut returned = None;
    let mut verdict = None;
    let mut open_streams = if job.terminal { 1 } else { 2 };
    let kill = || {
        let _ = rustix::process::kill_process_group(qemu, Signal::KILL);
    };
    let exit = loop {
        let hangs = pulse.map(|pulse| pulse + PULSE_LIMIT);
        let next = hangs.map_or(deadline, |hangs| hangs.min(deadline));
        let left = next.saturating_duration_since(Instant::now());
        match events.recv_timeout(left) {
            Ok(Event::Up) => {
                up = true;
                pulse = (!job.icount).then(Instant::now);
                deadline = began + job.limit;
                if let Some(listener) = stdin.take() {
                    feed_stdin(listener);
                }
            }
            Ok(Event::Alive) => pulse = Some(Instant::now()),
            Ok(Event::Returned(status)) => {
                returned = Some(status);
                pulse = None;
                deadline = Instant::now() + POWER_OFF_LIMIT;
            }
            Ok(Event::StreamEnded) => open_streams -= 1,
            Ok(Event::OutputClosed) => {
                kill();
                verdict = Some(Err(Failure::OutputClosed));
            }
            Ok(Event::Exit(status)) => break status,
            Err(RecvTimeoutError::Timeout) => {
                if !up && verdict.is_none() {
                    let console = fs::metadata(dir.join("console.log")).map_or(0, |log| log.len());
                    let longer = (Instant::now() + BOOT_LIMIT).min(began + job.limit);
                    if is_prolonged(&mut printed, console) && longer > deadline {
                        deadline = longer;
                        continue;
                    }
                }
                if next < deadline {
                    describe(dir);
                }
                kill();
                if returned.is_none() && verdict.is_none() {
                    verdict = Some(Ok(if !up {
                        HostExit::BootHang
                    } else if next < deadline {
                        HostExit::Hang
                    } else {
                        HostExit::TimeLimit
                    }));
                }
                pulse = None;
                deadline = Instant::now() + POWER_OFF_LIMIT;
            }
            Err(RecvTimeoutError::Disconnected) => break None,
        }
    };
    // QEMU has exited: its last output is still in transit through the sockets.
    while up && open_streams > 0 {
        match events.recv_timeout(POWER_OFF_LIMIT) {
            Ok(Event::StreamEnded) => open_streams -= 1,
            Ok(Event::Returned(status)) => returned = Some(status),
            Ok(_) => {}
            Err(_) => break,
        }
    }
    // So is the status, if QEMU exited by itself.
    while up && returned.is_none() && verdict.is_none() {
        match events.recv_timeout(STATUS_LIMIT) {
            Ok(Event::Returned(status)) => returned = Some(status),
            Ok(_) => {}
            Err(_) => break,
        }
    }
    match (returned, verdict) {
        (_, Some(Err(failure))) => Err(failure),
        (Some(status), _) => Ok(HostExit::Status(status)),
        (None, Some(Ok(ended))) => Ok(ended),
        (None, None) => Err(Failure::Died(exit)),
    }
}

/// Whether a host that boots has more time: its console has more than the `printed` bytes of when
/// it was looked at last.
fn is_prolonged(printed: &mut u64, console: u64) -> bool {
    let has_progress = console > *printed;
    *printed = console;
    has_progress
}

/// Appends QEMU's information on the CPUs of a hanging host to the console's log.
fn describe(dir: &Path) {
    let ask = || -> io::Result<()> {
        let mut monitor = UnixStream::connect(dir.join(MONITOR))?;
        monitor.set_read_timeout(Some(STATUS_LIMIT))?;
        monitor.write_all(b"info cpus\ninfo registers -a\n")?;
        let mut log = fs::OpenOptions::new()
            .append(true)
            .open(dir.join("console.log"))?;
        // It ends by the read timeout: the monitor stays open.
        let _ = io::copy(&mut monitor, &mut log);
        Ok(())
    };
    let _ = ask();
}

/// Serves one stream from the host on a thread.
fn serve(name: &str, listener: UnixListener, events: Sender<Event>) {
    let name = name.to_owned();
    std::thread::spawn(move || {
        let Ok((stream, _)) = listener.accept() else {
            return;
        };
        match name.as_str() {
            "status" => read_status(stream, &events),
            "stdout" => copy_out(stream, io::stdout(), &events),
            "stderr" => copy_out(stream, io::stderr(), &events),
            "hvc" => {
                if let Ok(input) = stream.try_clone() {
                    std::thread::spawn(move || copy_in(input));
                }
                copy_out(stream, io::stdout(), &events);
            }
            _ => send_sizes(stream),
        }
    });
}

fn read_status(stream: UnixStream, events: &Sender<Event>) {
    for line in BufReader::new(&stream).lines().map_while(Result::ok) {
        let event = match line.strip_prefix("rc=").map(str::parse) {
            Some(Ok(status)) => {
                // The host waits for this before it powers off.
                let _ = (&stream).write_all(b"seen\n");
                Event::Returned(status)
            }
            _ if line == "up" => Event::Up,
            _ if line == "alive" => Event::Alive,
            _ => continue,
        };
        if events.send(event).is_err() {
            return;
        }
    }
}

fn copy_out(mut stream: UnixStream, mut out: impl Write, events: &Sender<Event>) {
    let mut buffer = [0_u8; 65536];
    loop {
        let event = match stream.read(&mut buffer) {
            Ok(0) => Event::StreamEnded,
            Ok(count) => {
                let bytes = buffer.get(..count).unwrap_or_default();
                match out.write_all(bytes).and_then(|()| out.flush()) {
                    Ok(()) => continue,
                    Err(_) => Event::OutputClosed,
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => Event::StreamEnded,
        };
        let _ = events.send(event);
        return;
    }
}

/// Forwards stdin and its end: the sending side is shut down and the socket stays open, because
/// QEMU would drop unread bytes of a closed one.
fn feed_stdin(listener: UnixListener) {
    std::thread::spawn(move || {
        if let Ok((stream, _)) = listener.accept() {
            copy_in(stream);
        }
    });
}

fn copy_in(mut stream: UnixStream) {
    let mut input = io::stdin();
    let mut buffer = [0_u8; 65536];
    loop {
        match input.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => {
                let bytes = buffer.get(..count).unwrap_or_default();
                if stream.write_all(bytes).is_err() {
                    return;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    let _ = stream.shutdown(std::net::Shutdown::Write);
    // Kept open until the host closes it.
    let _ = io::copy(&mut stream, &mut io::sink());
}

/// Sends each new size of the terminal to the host.
fn send_sizes(mut stream: UnixStream) {
    let Ok(mut signals) = Signals::new([SIGWINCH]) else {
        return;
    };
    for _ in signals.forever() {
        let (rows, columns) = terminal_size();
        if writeln!(stream, "{rows} {columns}").is_err() {
            return;
        }
    }
}

fn terminal_size() -> (u16, u16) {
    match rustix::termios::tcgetwinsize(rustix::stdio::stdin()) {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => (size.ws_row, size.ws_col),
        _ => (24, 80),
    }
}

/// Returns QEMU's arguments.
fn machine(
    image: &Image,
    job: &Job,
    dir: &Path,
    initramfs: &Path,
    streams: &[&str],
) -> Vec<String> {
    let at = |name: &str| dir.join(name).display().to_string();
    let mut arguments: Vec<String> = Vec::new();
    let mut add = |words: &[&str]| arguments.extend(words.iter().map(|word| (*word).to_owned()));
    add(&[
        "-M",
        "q35",
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-no-reboot",
    ]);
    // An AMD CPU, as QEMU emulates SVM and not VT-x; its XSAVES confuses guests.
    add(&["-cpu", "EPYC,+svm,+npt,-xsaves", "-m", &job.memory]);
    if job.icount {
        add(&[
            "-accel",
            "tcg,thread=single",
            "-icount",
            "shift=0,sleep=off",
            "-smp",
            "1",
        ]);
    } else {
        add(&[
            "-accel",
            "tcg,thread=multi,tb-size=1024",
            "-smp",
            &job.cpus.to_string(),
        ]);
    }
    add(&["-kernel", &image.kernel.display().to_string()]);
    add(&["-initrd", &initramfs.display().to_string()]);
    add(&["-append", KERNEL_COMMAND_LINE]);
    add(&["-device", "isa-debug-exit,iobase=0x501,iosize=1"]);
    add(&[
        "-chardev",
        &format!("file,id=console,path={}", at("console.log")),
    ]);
    add(&["-serial", "chardev:console"]);
    add(&[
        "-monitor",
        &format!("unix:{},server=on,wait=off", at(MONITOR)),
    ]);
    let share = |path: &Path, tag: &str, more: &str| {
        format!(
            "local,path={},mount_tag={tag},id={tag},security_model=none,multidevs=remap{more}",
            path.display().to_string().replace(',', ",,")
        )
    };
    add(&["-virtfs", &share(Path::new("/"), "root", ",readonly=on")]);
    for (index, path) in job.shares.iter().enumerate() {
        add(&["-virtfs", &share(path, &format!("rw{index}"), "")]);
    }
    if job.network {
        add(&["-nic", "user,model=virtio-net-pci"]);
    }
    add(&["-device", "virtio-serial-pci,max_ports=8"]);
    for name in streams {
        let device = if *name == "hvc" {
            "virtconsole"
        } else {
            "virtserialport"
        };
        add(&["-chardev", &format!("socket,id={name},path={}", at(name))]);
        add(&["-device", &format!("{device},chardev={name},name={name}")]);
    }
    arguments
}

/// The socket of QEMU's monitor, in the directory of a run.
const MONITOR: &str = "monitor";

/// `norandmaps`: the emulator finds translated code by its virtual address also. A program that is
/// started again at other addresses is translated again, and that is most of what its start takes.
const KERNEL_COMMAND_LINE: &str = "console=ttyS0 panic=-1 quiet mitigations=off nokaslr \
    norandmaps tsc=reliable no_timer_check random.trust_cpu=on";

/// Writes the test host's initramfs with this job's files appended.
fn write_initramfs(image: &Image, job: &Job, path: &Path) -> Result<()> {
    let write = || -> io::Result<()> {
        fs::copy(&image.initramfs, path)?;
        let mut archive = podvisor_cpio::Writer::new(Vec::new());
        archive.file("host/conf", 0o644, configuration(image, job).as_bytes())?;
        archive.file("host/run", 0o755, script(job).as_bytes())?;
        let bytes = archive.finish()?;
        fs::OpenOptions::new()
            .append(true)
            .open(path)?
            .write_all(&bytes)
    };
    write().with_context(|| format!("{} cannot be written", path.display()))
}

/// Returns the configuration for `stage2.sh`.
fn configuration(image: &Image, job: &Job) -> String {
    let (rows, columns) = terminal_size();
    let flag = u8::from;
    let path = |path: &Path| quote(&path.display().to_string());
    let mut text = format!(
        "RELEASE={}\nMODULES={}\nTERMINAL={}\nROWS={rows}\nCOLUMNS={columns}\nSTDIN={}\n\
         PULSE={}\n",
        quote(&image.release),
        path(&image.modules),
        flag(job.terminal),
        flag(job.stdin),
        // Under `icount`, it would add work to the measured machine.
        if job.icount { 0 } else { PULSE.as_secs() },
    );
    text.push_str("prepare() {\n    :\n");
    if job.network {
        text.push_str("    network\n");
    }
    for (index, share) in job.shares.iter().enumerate() {
        text.push_str(&format!("    share rw{index} {}\n", path(share)));
    }
    for (index, copy) in job.copies.iter().enumerate() {
        text.push_str(&format!("    copy {index} {}\n", path(copy)));
    }
    text.push_str("}\nunshare_all() {\n    :\n");
    for share in job.shares.iter().rev() {
        text.push_str(&format!(
            "    $B umount {0} || $B umount -l {0}\n",
            path(share)
        ));
    }
    text.push_str("}\n");
    text
}

/// Returns the script that executes the command.
fn script(job: &Job) -> String {
    let mut text = String::new();
    for (name, value) in &job.environment {
        text.push_str(&format!("export {name}={}\n", quote(value)));
    }
    let directory = quote(&job.directory.display().to_string());
    text.push_str(&format!("cd {directory} || exit 125\nexec"));
    for word in &job.command {
        text.push(' ');
        text.push_str(&quote(word));
    }
    text.push('\n');
    text
}

/// Quotes a word for a POSIX shell.
pub(crate) fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// Returns where the kernel messages of a hanging host are kept.
pub(crate) fn console_log() -> PathBuf {
    paths::host().join("console.log")
}

#[cfg(test)]
mod tests {
    use super::{is_prolonged, quote};

    #[test]
    fn a_host_that_boots_has_more_time_as_long_as_its_console_grows() {
        let mut printed = 0;
        let looks = [0, 700, 700, 701].map(|console| is_prolonged(&mut printed, console));
        assert_eq!(looks, [false, true, false, true]);
    }

    #[test]
    fn quoted_words_come_back_from_a_shell() {
        for word in ["", "a b", "it's", "$HOME `x` \"y\"", "a\nb", "\\"] {
            let out = std::process::Command::new("sh")
                .arg("-c")
                .arg(format!("printf %s {}", quote(word)))
                .output()
                .unwrap();
            assert_eq!(String::from_utf8(out.stdout).unwrap(), word);
        }
    }
}

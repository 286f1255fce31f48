//! Programs that the host runs.

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use rustix::event::{PollFd, PollFlags};
use rustix::io::ioctl_fionbio;
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use serde_json::{Map, Value, json};

use super::tool;
use crate::protocol::{Capture, Exec, Fault};

/// Most programs that run, or have ended and were not asked for.
pub const MAX_PROGRAMS: usize = 64;

/// Most bytes of output that are kept of one program: what fits as base64 into an answer of 8 MiB,
/// the longest one that podvisor takes.
pub const MAX_OUTPUT: usize = 5 << 20;

/// Most bytes of output that are kept of all programs together.
pub const MAX_KEPT: usize = 16 << 20;

/// How long the output of a program that has ended is waited for: another one may have it.
const PATIENCE: Duration = Duration::from_secs(2);

/// Bytes that are read at once, and pieces of one program's output in one turn.
const PIECE: usize = 16 << 10;
const PIECES: usize = 64;

/// Programs by their process numbers.
#[derive(Debug, Default)]
pub(super) struct Programs {
    known: BTreeMap<i64, Program>,
}

#[derive(Debug)]
struct Program {
    /// Is waited for when it is forgotten: until then, its number is nobody else's.
    child: Child,
    ended: Option<Instant>,
    input: Option<Input>,
    stdout: Option<Output>,
    stderr: Option<Output>,
}

#[derive(Debug)]
struct Input {
    pipe: io::PipeWriter,
    bytes: Vec<u8>,
    written: usize,
}

#[derive(Debug)]
struct Output {
    /// Is there as long as somebody may write.
    pipe: Option<io::PipeReader>,
    bytes: Vec<u8>,
    is_truncated: bool,
}

impl Output {
    fn new(pipe: io::PipeReader) -> Self {
        Self {
            pipe: Some(pipe),
            bytes: Vec::new(),
            is_truncated: false,
        }
    }

    /// Reads what is there; keeps at most `room` bytes more of it.
    fn turn(&mut self, mut room: usize) {
        let Some(pipe) = &mut self.pipe else { return };
        let mut piece = vec![0; PIECE];
        for _ in 0..PIECES {
            match pipe.read(&mut piece) {
                Ok(count @ 1..) => {
                    let kept = piece.get(..count.min(room)).unwrap_or_default();
                    self.bytes.extend_from_slice(kept);
                    room -= kept.len();
                    self.is_truncated |= kept.len() < count;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(_) | Err(_) => {
                    self.pipe = None;
                    return;
                }
            }
        }
    }
}

impl Input {
    /// Writes what is possible; whether there is more.
    fn turn(&mut self) -> bool {
        loop {
            let rest = self.bytes.get(self.written..).unwrap_or_default();
            if rest.is_empty() {
                return false;
            }
            match self.pipe.write(rest) {
                Ok(count) => self.written += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The program does not read it all, or has closed it.
                Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
            }
        }
    }
}

impl Program {
    fn kept(&self) -> usize {
        let outputs = [&self.stdout, &self.stderr].into_iter().flatten();
        outputs.map(|output| output.bytes.len()).sum()
    }

    fn turn(&mut self, room: usize) {
        // First: what it wrote before its end is in the pipes by then.
        if self.ended.is_none() && has_ended(&self.child) {
            self.ended = Some(Instant::now());
        }
        if let Some(input) = &mut self.input
            && !input.turn()
        {
            self.input = None;
        }
        let limit = self.kept().saturating_add(room).min(MAX_OUTPUT);
        for output in [0, 1] {
            let room = limit.saturating_sub(self.kept());
            let output = match output {
                0 => &mut self.stdout,
                _ => &mut self.stderr,
            };
            if let Some(output) = output {
                output.turn(room);
            }
        }
    }

    /// Whether it has ended, and so has its output.
    fn is_done(&self) -> bool {
        let Some(ended) = self.ended else {
            return false;
        };
        let mut outputs = [&self.stdout, &self.stderr].into_iter().flatten();
        outputs.all(|output| output.pipe.is_none()) || ended.elapsed() >= PATIENCE
    }

    /// Forgets the program; returns how it ended.
    fn end(mut self) -> Result<Value, Fault> {
        let status = self.child.wait();
        let status = status.map_err(|error| Fault::io("wait for", "a program", &error))?;
        let mut end = Map::new();
        end.insert("exited".to_owned(), json!(true));
        if let Some(code) = status.code() {
            end.insert("exitcode".to_owned(), json!(code));
        }
        if let Some(signal) = status.signal() {
            end.insert("signal".to_owned(), json!(signal));
        }
        for (output, name) in [(self.stdout, "out"), (self.stderr, "err")] {
            let Some(output) = output else { continue };
            if !output.bytes.is_empty() {
                let data = BASE64.encode(&output.bytes);
                end.insert(format!("{name}-data"), json!(data));
            }
            if output.is_truncated {
                end.insert(format!("{name}-truncated"), json!(true));
            }
        }
        Ok(Value::Object(end))
    }
}

/// Whether a process has ended; it stays for `wait`.
fn has_ended(child: &Child) -> bool {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let Some(pid) = pid else { return true };
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    match waitid(WaitId::Pid(pid), options) {
        Ok(status) => status.is_some(),
        Err(error) => error != rustix::io::Errno::INTR,
    }
}

impl Programs {
    /// Starts a program; returns the answer with its number.
    pub(super) fn start(&mut self, exec: Exec) -> Result<Value, Fault> {
        self.make_room()?;
        let failed = |error: io::Error| Fault::io("run", &exec.path, &error);
        let mut command = Command::new(find(&exec.path).map_err(failed)?);
        command.arg0(&exec.path).args(&exec.arg).current_dir("/");
        if !exec.env.is_empty() {
            command.env_clear();
            for variable in &exec.env {
                let (name, value) = variable.split_once('=').ok_or_else(|| {
                    Fault::new(format!("the variable {variable:?} is not NAME=VALUE"))
                })?;
                if name.is_empty() {
                    return Err(Fault::new("a variable has no name"));
                }
                command.env(name, value);
            }
        }
        let input = match exec.input_data.is_empty() {
            true => {
                command.stdin(Stdio::null());
                None
            }
            false => {
                let (theirs, pipe) = io::pipe().map_err(failed)?;
                ioctl_fionbio(&pipe, true).map_err(|error| failed(error.into()))?;
                command.stdin(theirs);
                Some(Input {
                    pipe,
                    bytes: exec.input_data,
                    written: 0,
                })
            }
        };
        let output = || -> io::Result<(Output, io::PipeWriter)> {
            let (pipe, theirs) = io::pipe()?;
            ioctl_fionbio(&pipe, true)?;
            Ok((Output::new(pipe), theirs))
        };
        let (mut stdout, mut stderr) = (None, None);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        if matches!(
            exec.capture_output,
            Capture::Stdout | Capture::Separated | Capture::Merged
        ) {
            let (output, theirs) = output().map_err(failed)?;
            if exec.capture_output == Capture::Merged {
                command.stderr(theirs.try_clone().map_err(failed)?);
            }
            command.stdout(theirs);
            stdout = Some(output);
        }
        if matches!(exec.capture_output, Capture::Stderr | Capture::Separated) {
            let (output, theirs) = output().map_err(failed)?;
            command.stderr(theirs);
            stderr = Some(output);
        }
        let child = command.spawn().map_err(failed)?;
        // With its ends of the pipes.
        drop(command);
        let number = i64::from(child.id());
        let program = Program {
            child,
            ended: None,
            input,
            stdout,
            stderr,
        };
        self.known.insert(number, program);
        self.turn();
        Ok(json!({ "pid": number }))
    }

    /// Returns what a program does; one that has ended is forgotten.
    pub(super) fn status(&mut self, number: i64) -> Result<Value, Fault> {
        self.turn();
        let Some(program) = self.known.get(&number) else {
            return Err(Fault::new(format!("PID {number} does not exist")));
        };
        if !program.is_done() {
            return Ok(json!({ "exited": false }));
        }
        match self.known.remove(&number) {
            Some(program) => program.end(),
            None => Ok(json!({ "exited": false })),
        }
    }

    /// Reads and writes what is possible without waiting.
    pub(super) fn turn(&mut self) {
        let mut kept: usize = self.known.values().map(Program::kept).sum();
        for program in self.known.values_mut() {
            let before = program.kept();
            program.turn(MAX_KEPT.saturating_sub(kept));
            kept += program.kept() - before;
        }
    }

    /// What there is to wait for.
    pub(super) fn waits_for(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.known.values().flat_map(|program| {
            let outputs = [&program.stdout, &program.stderr].into_iter().flatten();
            let outputs = outputs.filter_map(|output| output.pipe.as_ref());
            let outputs = outputs.map(|pipe| PollFd::from_borrowed_fd(pipe.as_fd(), PollFlags::IN));
            let input = program.input.as_ref().map(|input| &input.pipe);
            let input = input.map(|pipe| PollFd::from_borrowed_fd(pipe.as_fd(), PollFlags::OUT));
            outputs.chain(input)
        })
    }

    /// Forgets the program that ended first if there are too many.
    fn make_room(&mut self) -> Result<(), Fault> {
        if self.known.len() < MAX_PROGRAMS {
            return Ok(());
        }
        self.turn();
        let ended = |(number, program): (&i64, &Program)| Some((program.ended?, *number));
        let oldest = self.known.iter().filter_map(ended).min();
        let Some((_, number)) = oldest else {
            return Err(Fault::new(format!("{MAX_PROGRAMS} programs run already")));
        };
        match self.known.remove(&number) {
            Some(program) => program.end().map(drop),
            None => Ok(()),
        }
    }
}

/// Looks for a program as a shell does.
fn find(path: &str) -> io::Result<PathBuf> {
    if path.contains('/') {
        return Ok(PathBuf::from(path));
    }
    let directories = std::env::var_os("PATH").unwrap_or_else(|| tool::DEFAULT_PATH.into());
    tool::search(std::env::split_paths(&directories), path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Exec {
        Exec {
            path: "sh".to_owned(),
            arg: vec!["-c".to_owned(), script.to_owned()],
            env: Vec::new(),
            input_data: Vec::new(),
            capture_output: Capture::Separated,
        }
    }

    fn started(programs: &mut Programs, exec: Exec) -> i64 {
        programs.start(exec).unwrap()["pid"].as_i64().unwrap()
    }

    /// Waits as the loop does.
    fn end(programs: &mut Programs, number: i64) -> Value {
        loop {
            let status = programs.status(number).unwrap();
            if status["exited"] == true {
                return status;
            }
            let mut fds: Vec<PollFd<'_>> = programs.waits_for().collect();
            let tick = rustix::event::Timespec {
                tv_sec: 0,
                tv_nsec: 10_000_000,
            };
            rustix::event::poll(&mut fds, Some(&tick)).unwrap();
        }
    }

    fn data(status: &Value, name: &str) -> Vec<u8> {
        BASE64.decode(status[name].as_str().unwrap()).unwrap()
    }

    #[test]
    fn more_output_than_is_kept_is_read_and_said_to_be_missing() {
        let mut programs = Programs::default();
        let script = "head -c 6000000 /dev/zero; head -c 100 /dev/zero >&2; exit 3";
        let number = started(&mut programs, shell(script));
        let status = end(&mut programs, number);
        assert_eq!(status["exitcode"], 3);
        assert_eq!(data(&status, "out-data").len(), MAX_OUTPUT);
        assert_eq!(status["out-truncated"], true);
        assert_eq!(status["err-data"], Value::Null);
        assert_eq!(status["err-truncated"], true);
    }

    #[test]
    fn a_program_that_leaves_another_with_its_output_ends_nevertheless() {
        let mut programs = Programs::default();
        let number = started(&mut programs, shell("sleep 60 & echo $!"));
        let status = end(&mut programs, number);
        let left = String::from_utf8(data(&status, "out-data")).unwrap();
        let left = left.trim().parse().unwrap();
        let left = Pid::from_raw(left).unwrap();
        rustix::process::kill_process(left, rustix::process::Signal::KILL).unwrap();
    }

    #[test]
    fn there_is_a_most_of_programs_and_those_that_have_ended_make_room() {
        let mut programs = Programs::default();
        let mut numbers = Vec::new();
        for _ in 0..MAX_PROGRAMS {
            numbers.push(started(&mut programs, shell("read line")));
        }
        // There is no input, so they end; nobody asks for them.
        let first = i32::try_from(numbers[0]).unwrap();
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(Pid::from_raw(first).unwrap()), options).unwrap();
        let last = started(&mut programs, shell("exit 7"));
        assert!(programs.known.len() <= MAX_PROGRAMS);
        assert_eq!(end(&mut programs, last)["exitcode"], 7);
        let mut running = Programs::default();
        for _ in 0..MAX_PROGRAMS {
            numbers.push(started(&mut running, shell("exec sleep 600")));
        }
        let fault = running.start(shell("true")).unwrap_err();
        assert!(fault.desc.contains("64 programs"), "{fault}");
        for program in running.known.values_mut() {
            program.child.kill().unwrap();
            program.child.wait().unwrap();
        }
    }

    #[test]
    fn streams_are_captured_as_asked() {
        let mut programs = Programs::default();
        for (capture, out, err) in [
            (Capture::None, None, None),
            (Capture::Stdout, Some("out\n"), None),
            (Capture::Stderr, None, Some("err\n")),
            (Capture::Merged, Some("out\nerr\n"), None),
        ] {
            let exec = Exec {
                capture_output: capture,
                ..shell("echo out; echo err >&2")
            };
            let number = started(&mut programs, exec);
            let status = end(&mut programs, number);
            for (name, wanted) in [("out-data", out), ("err-data", err)] {
                let said = status[name].is_string().then(|| data(&status, name));
                assert_eq!(said.as_deref(), wanted.map(str::as_bytes), "{capture:?}");
            }
        }
    }

    #[test]
    fn what_is_wrong_with_a_program_is_said_in_the_c_librarys_words() {
        let mut programs = Programs::default();
        for (path, said) in [
            ("no-such-program", "No such file or directory"),
            ("/no/such/program", "No such file or directory"),
            ("/etc/passwd", "Permission denied"),
        ] {
            let exec = Exec {
                path: path.to_owned(),
                ..shell("")
            };
            let fault = programs.start(exec).unwrap_err();
            assert!(
                fault.desc.contains(said) && fault.desc.contains(path),
                "{fault}"
            );
        }
        let exec = Exec {
            env: vec!["novalue".to_owned()],
            ..shell("")
        };
        assert!(
            programs
                .start(exec)
                .unwrap_err()
                .desc
                .contains("NAME=VALUE")
        );
        assert!(programs.status(1).unwrap_err().desc.contains("PID 1"));
    }
}

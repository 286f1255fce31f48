//! Stands in for a machine's process, for tests without guests: it answers on a control socket like
//! such a process, and acts on files in a directory.
//!
//! The arguments are the socket, the directory and the protocol version. In the directory,
//! - a file with a call's name blocks that call until the file is removed,
//! - `refuse-` and a call's name is the message with which that call is refused, and
//!   `kind-` and that name its kind, `Internal` without,
//! - with `ended` its machine has powered off, as who asks from then on is told,
//! - with `lose-exits` exits are never reported,
//! - with `lost` its machine has ended: programs have ended with it, and the process exits once it
//!   has told that,
//! - `grown` is the guest's memory beyond that at boot, in bytes, regardless of requests,
//! - with `short` the guest is short of memory, which is reported once and removes the file,
//! - with `linger` its machine ends when that is requested, and the process itself when that file
//!   is removed,
//! - `running` has the ids of containers, one per line, that run from the start,
//! - `created-` and a container's id is what was requested for it,
//! - calls are written to `calls`, one per line, before they are blocked: a call's name and the
//!   container's id, and `exec` for those about another process in it.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

/// Interval for checking whether a file is removed.
const LOOK: Duration = Duration::from_millis(5);

/// Whether containers run, by their ids, and execs in them, by theirs; false for those that have
/// ended.
#[derive(Debug, Default)]
struct Containers(Mutex<BTreeMap<String, State>>, Condvar);

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    Created,
    /// Its start is blocked.
    Starting,
    Running,
    Exited,
}

#[derive(Debug)]
struct Process {
    socket: PathBuf,
    directory: PathBuf,
    version: u32,
    containers: Containers,
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut next = || arguments.next().expect("an argument");
    let socket = PathBuf::from(next());
    let listener = UnixListener::bind(&socket).expect("a socket");
    let directory = PathBuf::from(next());
    let version = next().parse().expect("a version");
    let running = fs::read_to_string(directory.join("running")).unwrap_or_default();
    let running = running.lines().map(|id| (id.to_owned(), State::Running));
    let containers = Containers(Mutex::new(running.collect()), Condvar::new());
    let process = Arc::new(Process {
        socket,
        directory,
        version,
        containers,
    });
    println!("listening");
    for stream in listener.incoming() {
        let process = Arc::clone(&process);
        let stream = stream.expect("a connection");
        thread::spawn(move || process.converse(stream));
    }
}

/// A frame is its length in four bytes, little-endian, followed by that many bytes.
fn read(stream: &mut UnixStream) -> io::Result<Value> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let mut body = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut body)?;
    Ok(serde_json::from_slice(&body)?)
}

fn write(stream: &Mutex<UnixStream>, reply: &Value) -> io::Result<()> {
    let body = reply.to_string();
    let length = u32::try_from(body.len()).unwrap_or(0).to_le_bytes();
    let mut stream = stream.lock().expect("a thread panicked");
    stream.write_all(&length)?;
    stream.write_all(body.as_bytes())
}

impl Process {
    fn converse(self: Arc<Self>, mut stream: UnixStream) {
        let replies = Arc::new(Mutex::new(stream.try_clone().expect("a descriptor")));
        while let Ok(request) = read(&mut stream) {
            let (process, replies) = (Arc::clone(&self), Arc::clone(&replies));
            thread::spawn(move || {
                let (name, arguments) = call(&request["call"]);
                let Some(answer) = process.answer(name, arguments) else {
                    return;
                };
                let reply = json!({ "number": request["number"], "answer": answer });
                // The client may be gone.
                let _ = write(&replies, &reply);
                if name == "Shutdown" {
                    process.linger(&replies);
                    std::process::exit(0);
                }
                if name == "Wait" && process.is_lost() {
                    std::process::exit(0);
                }
            });
        }
    }

    /// Returns `None` for a call that is not answered.
    fn answer(&self, name: &str, arguments: &Value) -> Option<Value> {
        let id = arguments["id"].as_str().unwrap_or_default();
        let exec_id = arguments["exec_id"].as_str();
        let process = exec_id.unwrap_or(id);
        match name {
            "Grow" => {
                let (bytes, patience) = (&arguments["bytes"], &arguments["patience_ms"]);
                self.note(&format!("Grow {bytes} within {patience}"));
            }
            "Stats" if arguments["brief"] == true => self.note(&format!("Stats {id} in brief")),
            _ if exec_id.is_some() => self.note(&format!("{name} {id} exec")),
            _ => self.note(&format!("{name} {id}")),
        }
        if name == "Start" {
            self.set(id, State::Starting);
        }
        while self.directory.join(name).exists() {
            thread::sleep(LOOK);
        }
        if let Ok(message) = fs::read_to_string(self.directory.join(format!("refuse-{name}"))) {
            let kind = fs::read_to_string(self.directory.join(format!("kind-{name}")));
            let kind = kind.unwrap_or_else(|_| "Internal".to_owned());
            if name == "Start" {
                self.set(id, State::Created);
            }
            return Some(json!({ "Err": { "kind": kind, "message": message } }));
        }
        let done = match name {
            "Hello" => json!({ "Hello": {
                "version": self.version, "takes_devices": true, "tells_pressure": true,
            } }),
            "Create" => {
                fs::write(
                    self.directory.join(format!("created-{id}")),
                    arguments.to_string(),
                )
                .expect("a file that can be written");
                self.set(id, State::Created);
                json!({ "Created": { "uid": 0, "gid": 0, "groups": [] } })
            }
            "Start" => {
                self.set(id, State::Running);
                json!({ "Started": { "pid": 7, "started_at_ns": 7 } })
            }
            "Signal" => {
                if !self.directory.join("lose-exits").exists() {
                    self.set(process, State::Exited);
                }
                json!("Done")
            }
            "Wait" => {
                self.wait(process);
                json!({ "Exit": {
                    "code": 137, "exited_at_ns": 8, "oom_killed": false,
                    "of_machine": self.is_lost(),
                } })
            }
            "IsPaused" => json!({ "IsPaused": false }),
            "List" => json!({ "List": self.list() }),
            "Grow" => {
                let grown = fs::read_to_string(self.directory.join("grown")).ok();
                let grown = grown.and_then(|grown| grown.parse().ok());
                json!({ "Grown": grown.unwrap_or_else(|| arguments["bytes"].clone()) })
            }
            "AwaitPressure" => {
                while fs::remove_file(self.directory.join("short")).is_err() {
                    thread::sleep(LOOK);
                }
                json!("Done")
            }
            "Ended" if self.directory.join("ended").exists() => json!({ "Ended": "PoweredOff" }),
            "Ended" => return None,
            _ => json!("Done"),
        };
        Some(json!({ "Ok": done }))
    }

    /// Simulates slow cleanup: the machine has ended, which the process recorded before it closed
    /// the connection.
    fn linger(&self, connection: &Mutex<UnixStream>) {
        let file = self.directory.join("linger");
        if !file.exists() {
            return;
        }
        let record = json!({ "exit": "PoweredOff", "containers": [] });
        fs::write(self.socket.with_file_name("exit.json"), record.to_string())
            .expect("a file that can be written");
        let connection = connection.lock().expect("a thread panicked");
        connection.shutdown(Shutdown::Both).expect("a connection");
        while file.exists() {
            thread::sleep(LOOK);
        }
    }

    fn note(&self, line: &str) {
        let mut options = OpenOptions::new();
        let calls = options.create(true).append(true).open(self.calls());
        let line = format!("{}\n", line.trim_end());
        calls
            .and_then(|mut calls| calls.write_all(line.as_bytes()))
            .expect("a file that can be written");
    }

    fn calls(&self) -> PathBuf {
        Path::new(&self.directory).join("calls")
    }

    fn set(&self, id: &str, state: State) {
        let Containers(states, changed) = &self.containers;
        let mut states = states.lock().expect("a thread panicked");
        states.insert(id.to_owned(), state);
        changed.notify_all();
    }

    fn is_lost(&self) -> bool {
        self.directory.join("lost").exists()
    }

    fn wait(&self, id: &str) {
        let Containers(states, changed) = &self.containers;
        let mut states = states.lock().expect("a thread panicked");
        while states.get(id) != Some(&State::Exited) && !self.is_lost() {
            let waited = changed.wait_timeout(states, LOOK);
            (states, _) = waited.expect("a thread panicked");
        }
    }

    fn list(&self) -> Vec<Value> {
        let states = self.containers.0.lock().expect("a thread panicked");
        let all = states.iter().map(|(id, state)| {
            let is_starting = *state == State::Starting;
            let state = if is_starting { &State::Created } else { state };
            json!({
                "id": id, "state": format!("{state:?}"), "pid": 7, "started_at_ns": 7,
                "exit": null, "is_starting": is_starting,
            })
        });
        all.collect()
    }
}

/// Returns the name of a call and its arguments.
fn call(call: &Value) -> (&str, &Value) {
    let with = call.as_object().and_then(|call| call.iter().next());
    match with {
        Some((name, arguments)) => (name, arguments),
        None => (call.as_str().unwrap_or_default(), &Value::Null),
    }
}

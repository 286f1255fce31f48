//! Listens on a Unix socket without ever answering, like a machine's process that is stopped, for
//! tests of the command line. Prints a line for each connection. With a second argument, it answers
//! the first request of each connection with it.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let socket = arguments.next().expect("the name of a socket");
    let greeting = arguments.next();
    let listener = UnixListener::bind(socket).expect("a socket");
    println!("listening");
    let mut connected = Vec::new();
    for stream in listener.incoming() {
        let mut stream = stream.expect("a connection");
        if let Some(greeting) = &greeting {
            greet(&mut stream, greeting).expect("a request");
        }
        connected.push(stream);
        println!("connected");
    }
}

/// A frame is its length in four bytes, little-endian, followed by that many bytes.
fn greet(stream: &mut UnixStream, greeting: &str) -> std::io::Result<()> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let mut request = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut request)?;
    let length = u32::try_from(greeting.len()).unwrap_or(0).to_le_bytes();
    stream.write_all(&length)?;
    stream.write_all(greeting.as_bytes())
}

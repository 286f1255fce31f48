//! One HTTP/1.1 request that asks for an upgrade, and its answer.

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::StreamError;

/// Longest head of a request.
const HEAD_BYTES: usize = 16 << 10;
/// Most header fields.
const FIELDS: usize = 100;

/// A request's head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Request {
    /// `GET` or `POST`.
    pub(super) method: String,
    /// The path, without a query.
    pub(super) path: String,
    /// Names in lower case.
    fields: Vec<(String, String)>,
}

impl Request {
    /// Reads a request's head, and not a byte more: what follows is another protocol's.
    pub(super) async fn read(io: &mut (impl AsyncRead + Unpin)) -> Result<Self, StreamError> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            if head.len() == HEAD_BYTES {
                return Err(StreamError::Http("its head is too long"));
            }
            head.push(io.read_u8().await?);
        }
        Self::parse(&head)
    }

    fn parse(head: &[u8]) -> Result<Self, StreamError> {
        let text = std::str::from_utf8(head).map_err(|_| StreamError::Http("it is not UTF-8"))?;
        let mut lines = text.split("\r\n");
        let mut words = lines.next().unwrap_or_default().split(' ');
        let (method, target, version) = (words.next(), words.next(), words.next());
        let (Some(method), Some(target), Some("HTTP/1.1")) = (method, target, version) else {
            return Err(StreamError::Http("it is not HTTP/1.1"));
        };
        let mut fields = Vec::new();
        for line in lines.filter(|line| !line.is_empty()) {
            let field = line.split_once(':');
            let (name, value) = field.ok_or(StreamError::Http("a field has no name"))?;
            if fields.len() == FIELDS {
                return Err(StreamError::Http("it has too many fields"));
            }
            fields.push((name.trim().to_ascii_lowercase(), value.trim().to_owned()));
        }
        // A proxy may write the whole URL.
        let path = target.split_once("://").map_or(target, |(_, rest)| {
            rest.find('/').and_then(|at| rest.get(at..)).unwrap_or("/")
        });
        let path = path.split(['?', '#']).next().unwrap_or_default();
        Ok(Self {
            method: method.to_owned(),
            path: path.to_owned(),
            fields,
        })
    }

    /// Values of a field: all of them, also those that share a line.
    pub(super) fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        let fields = self.fields.iter().filter(move |(n, _)| n == name);
        fields
            .flat_map(|(_, value)| value.split(','))
            .map(str::trim)
    }

    /// Whether the client asks to go on in `protocol`.
    pub(super) fn upgrades_to(&self, protocol: &str) -> bool {
        self.values("connection")
            .any(|word| word.eq_ignore_ascii_case("upgrade"))
            && self
                .values("upgrade")
                .any(|word| word.eq_ignore_ascii_case(protocol))
    }
}

/// Answers and ends with an error.
pub(super) async fn refuse(
    io: &mut (impl AsyncWrite + Unpin),
    status: &str,
    fields: &str,
    message: &str,
) -> std::io::Result<()> {
    let length = message.len();
    let answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\n\
         Connection: close\r\n{fields}\r\n{message}"
    );
    io.write_all(answer.as_bytes()).await?;
    io.shutdown().await
}

/// Goes on in SPDY/3.1, with `protocol` on it.
pub(super) async fn switch(
    io: &mut (impl AsyncWrite + Unpin),
    protocol: &str,
) -> std::io::Result<()> {
    let answer = format!(
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: SPDY/3.1\r\nConnection: Upgrade\r\n\
         X-Stream-Protocol-Version: {protocol}\r\n\r\n"
    );
    io.write_all(answer.as_bytes()).await?;
    io.flush().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_is_read_and_not_a_byte_more() {
        let mut bytes =
            &b"POST /exec/abc?x=1 HTTP/1.1\r\nHost: a\r\nconnection: keep-alive, Upgrade\r\n\
            Upgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\n\
            X-Stream-Protocol-Version: v3.channel.k8s.io, channel.k8s.io\r\n\r\nrest"[..];
        let request = Request::read(&mut bytes).await.unwrap();
        assert_eq!(bytes, b"rest");
        assert_eq!(
            (request.method.as_str(), request.path.as_str()),
            ("POST", "/exec/abc")
        );
        assert!(request.upgrades_to("spdy/3.1") && !request.upgrades_to("websocket"));
        let offered: Vec<&str> = request.values("x-stream-protocol-version").collect();
        assert_eq!(
            offered,
            ["v4.channel.k8s.io", "v3.channel.k8s.io", "channel.k8s.io"]
        );
    }

    #[tokio::test]
    async fn what_is_no_request_is_an_error_and_bounded() {
        let endless = [b'x'; HEAD_BYTES + 10];
        for bad in [
            &b"GET / HTTP/1.0\r\n\r\n"[..],
            b"\r\n\r\n",
            b"GET /\r\n\r\n",
            b"GET / HTTP/1.1\r\nno field\r\n\r\n",
            b"GET / HTTP/1.1\r\n\xff: x\r\n\r\n",
            b"GET / HTTP/1.1\r\n",
            &endless,
        ] {
            assert!(Request::read(&mut &*bad).await.is_err());
        }
    }

    #[test]
    fn the_path_of_a_whole_url_is_found() {
        let request = Request::parse(b"GET http://h:1/a/b?q HTTP/1.1\r\n\r\n").unwrap();
        assert_eq!(request.path, "/a/b");
    }
}

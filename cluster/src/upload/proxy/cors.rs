//! Pages of other sites that upload from a browser (CORS, <https://fetch.spec.whatwg.org>).
//!
//! Any site may: nothing is allowed by what a browser adds by itself, such as a cookie. A page
//! needs a token, and whoever has one can send it from anywhere.

use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header, request::Parts};

use crate::https::{self, Answer};

/// How long a browser need not ask again, in seconds.
const MAX_AGE: &str = "600";

/// What a browser asks before it sends an upload; `None` if this is no such question.
pub(super) fn preflight(request: &Parts) -> Option<Answer> {
    let asks = request.headers.contains_key(header::ORIGIN)
        && request
            .headers
            .contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    if request.method != Method::OPTIONS || !asks {
        return None;
    }
    let mut answer = https::text(StatusCode::NO_CONTENT, "");
    let headers = answer.headers_mut();
    headers.remove(header::CONTENT_TYPE);
    insert(
        headers,
        header::ACCESS_CONTROL_ALLOW_METHODS,
        "HEAD, POST, PUT",
    );
    // A wildcard does not cover the first of these.
    let allowed = "authorization, content-type";
    insert(headers, header::ACCESS_CONTROL_ALLOW_HEADERS, allowed);
    insert(headers, header::ACCESS_CONTROL_MAX_AGE, MAX_AGE);
    Some(answer)
}

/// Lets a page of any site read an answer.
pub(super) fn allow(request: &Parts, mut answer: Answer) -> Answer {
    if request.headers.contains_key(header::ORIGIN) {
        insert(
            answer.headers_mut(),
            header::ACCESS_CONTROL_ALLOW_ORIGIN,
            "*",
        );
    }
    answer
}

fn insert(headers: &mut HeaderMap, name: HeaderName, value: &'static str) {
    headers.insert(name, HeaderValue::from_static(value));
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn request(method: Method, headers: &[(&str, &str)]) -> Parts {
        let mut request = Request::builder().method(method);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    #[test]
    fn a_browser_is_told_that_any_site_may_upload_with_a_token() {
        let asks = [
            ("origin", "https://console.example"),
            ("access-control-request-method", "POST"),
        ];
        let request = request(Method::OPTIONS, &asks);
        let answer = allow(&request, preflight(&request).unwrap());
        assert_eq!(answer.status(), 204);
        let header = |name: &str| answer.headers()[name].to_str().unwrap();
        assert_eq!(header("access-control-allow-origin"), "*");
        assert!(header("access-control-allow-headers").contains("authorization"));
        // No browser sends what it knows of the user.
        let credentials = "access-control-allow-credentials";
        assert!(!answer.headers().contains_key(credentials));
    }

    #[test]
    fn other_requests_are_no_questions_and_other_clients_get_no_such_headers() {
        for (method, headers) in [
            (Method::OPTIONS, &[][..]),
            (Method::OPTIONS, &[("origin", "https://a")]),
            (
                Method::POST,
                &[
                    ("origin", "https://a"),
                    ("access-control-request-method", "POST"),
                ],
            ),
        ] {
            assert!(preflight(&request(method, headers)).is_none());
        }
        let answer = allow(&request(Method::POST, &[]), https::text(StatusCode::OK, ""));
        let name = header::ACCESS_CONTROL_ALLOW_ORIGIN;
        assert!(!answer.headers().contains_key(name));
    }
}

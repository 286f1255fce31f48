//! What both services have in common: the macro that makes a trait, its server and its client of a
//! list of calls.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio_stream::Stream;
use tonic::{Request, Response, Status};
use tower_service::Service;

/// The answers of a call that has several.
pub type Messages<M> = Pin<Box<dyn Stream<Item = Result<M, Status>> + Send>>;

/// The future of a call.
pub(crate) type Answer<R> = Pin<Box<dyn Future<Output = Result<Response<R>, Status>> + Send>>;

/// A call of a service, as tonic makes it.
pub(crate) struct Handler<T, Q, R> {
    pub(crate) inner: Arc<T>,
    pub(crate) call: fn(Arc<T>, Request<Q>) -> Answer<R>,
}

impl<T, Q, R> Service<Request<Q>> for Handler<T, Q, R> {
    type Response = Response<R>;
    type Error = Status;
    type Future = Answer<R>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        (self.call)(Arc::clone(&self.inner), request)
    }
}

/// Makes a service of its calls: `METHOD: "NAME", REQUEST => ANSWER;`, with `stream ANSWER` where
/// there are several. After the documentation come the names of the trait, the server and the client,
/// and the service's name on the wire.
macro_rules! service {
    (
        $(#[$doc:meta])*
        $service:ident, $server:ident, $client:ident, $name:literal;
        $(
            $(#[$call_doc:meta])*
            $method:ident: $call:literal, $request:ty => $($answer:ident)+;
        )*
    ) => {
        $(#[$doc])*
        pub trait $service: Send + Sync + 'static {
            $(
                $(#[$call_doc])*
                fn $method(
                    &self,
                    request: ::tonic::Request<$request>,
                ) -> impl ::std::future::Future<
                    Output = Result<
                        ::tonic::Response<$crate::service::answer_type!($($answer)+)>,
                        ::tonic::Status,
                    >,
                > + Send {
                    let _ = request;
                    async { Err(::tonic::Status::new(::tonic::Code::Unimplemented, "")) }
                }
            )*
        }

        /// Serves a
        #[doc = concat!("[`", stringify!($service), "`].")]
        #[derive(Debug)]
        pub struct $server<T> {
            inner: ::std::sync::Arc<T>,
            max_decoding: Option<usize>,
            max_encoding: Option<usize>,
        }

        impl<T> $server<T> {
            /// The service's name on the wire.
            pub const NAME: &'static str = $name;

            /// Serves `inner`.
            pub fn new(inner: T) -> Self {
                Self {
                    inner: ::std::sync::Arc::new(inner),
                    max_decoding: None,
                    max_encoding: None,
                }
            }

            /// Sets how many bytes a request may have, 4 MiB by default.
            #[must_use]
            pub fn max_decoding_message_size(mut self, limit: usize) -> Self {
                self.max_decoding = Some(limit);
                self
            }

            /// Sets how many bytes an answer may have, any number by default.
            #[must_use]
            pub fn max_encoding_message_size(mut self, limit: usize) -> Self {
                self.max_encoding = Some(limit);
                self
            }
        }

        impl<T> Clone for $server<T> {
            fn clone(&self) -> Self {
                Self {
                    inner: ::std::sync::Arc::clone(&self.inner),
                    max_decoding: self.max_decoding,
                    max_encoding: self.max_encoding,
                }
            }
        }

        impl<T> ::tonic::server::NamedService for $server<T> {
            const NAME: &'static str = $name;
        }

        impl<T: $service> ::tower_service::Service<::tonic::codegen::http::Request<::tonic::body::Body>>
            for $server<T>
        {
            type Response = ::tonic::codegen::http::Response<::tonic::body::Body>;
            type Error = ::std::convert::Infallible;
            type Future = ::std::pin::Pin<
                Box<dyn ::std::future::Future<Output = Result<Self::Response, Self::Error>> + Send>,
            >;

            fn poll_ready(
                &mut self,
                _: &mut ::std::task::Context<'_>,
            ) -> ::std::task::Poll<Result<(), Self::Error>> {
                ::std::task::Poll::Ready(Ok(()))
            }

            fn call(&mut self, request: ::tonic::codegen::http::Request<::tonic::body::Body>) -> Self::Future {
                let inner = ::std::sync::Arc::clone(&self.inner);
                let limits = (self.max_decoding, self.max_encoding);
                match request.uri().path() {
                    $(
                        concat!("/", $name, "/", $call) => Box::pin(async move {
                            let handler: $crate::service::Handler<
                                T,
                                $request,
                                $crate::service::answer_type!($($answer)+),
                            > = $crate::service::Handler {
                                inner,
                                call: |inner, request| {
                                    Box::pin(async move { inner.$method(request).await })
                                },
                            };
                            let codec = ::tonic_prost::ProstCodec::default();
                            let mut grpc = ::tonic::server::Grpc::new(codec)
                                .apply_max_message_size_config(limits.0, limits.1);
                            Ok($crate::service::serve!(grpc, handler, request, $($answer)+))
                        }),
                    )*
                    _ => Box::pin(async {
                        Ok(::tonic::Status::new(::tonic::Code::Unimplemented, "").into_http())
                    }),
                }
            }
        }

        /// Calls a
        #[doc = concat!("[`", stringify!($service), "`].")]
        #[derive(Debug, Clone)]
        pub struct $client<C> {
            inner: ::tonic::client::Grpc<C>,
        }

        impl<C> $client<C>
        where
            C: ::tonic::client::GrpcService<::tonic::body::Body>,
            C::Error: Into<::tonic::codegen::StdError>,
            C::ResponseBody: ::tonic::codegen::Body<Data = ::tonic::codegen::Bytes> + Send + 'static,
            <C::ResponseBody as ::tonic::codegen::Body>::Error:
                Into<::tonic::codegen::StdError> + Send,
        {
            /// Calls over `channel`.
            pub fn new(channel: C) -> Self {
                Self {
                    inner: ::tonic::client::Grpc::new(channel),
                }
            }

            /// Sets how many bytes an answer may have, 4 MiB by default.
            #[must_use]
            pub fn max_decoding_message_size(mut self, limit: usize) -> Self {
                self.inner = self.inner.max_decoding_message_size(limit);
                self
            }

            /// Sets how many bytes a request may have, any number by default.
            #[must_use]
            pub fn max_encoding_message_size(mut self, limit: usize) -> Self {
                self.inner = self.inner.max_encoding_message_size(limit);
                self
            }

            $(
                $(#[$call_doc])*
                ///
                /// # Errors
                ///
                /// If the channel is broken, or as the service answers.
                pub async fn $method(
                    &mut self,
                    request: impl ::tonic::IntoRequest<$request>,
                ) -> Result<
                    ::tonic::Response<$crate::service::received_type!($($answer)+)>,
                    ::tonic::Status,
                > {
                    self.inner.ready().await.map_err(|error| {
                        ::tonic::Status::unknown(format!(
                            "the channel is not ready: {}",
                            error.into()
                        ))
                    })?;
                    let path = ::tonic::codegen::http::uri::PathAndQuery::from_static(
                        concat!("/", $name, "/", $call),
                    );
                    let codec = ::tonic_prost::ProstCodec::default();
                    $crate::service::ask!(
                        self.inner, request.into_request(), path, codec, $($answer)+
                    )
                }
            )*
        }
    };
}

/// What a trait's method answers with.
macro_rules! answer_type {
    (stream $answer:ident) => { $crate::service::Messages<$answer> };
    ($answer:ident) => { $answer };
}

/// What a client's method gets.
macro_rules! received_type {
    (stream $answer:ident) => { ::tonic::Streaming<$answer> };
    ($answer:ident) => { $answer };
}

/// Answers one call.
macro_rules! serve {
    ($grpc:ident, $handler:ident, $request:ident, stream $answer:ident) => {
        $grpc.server_streaming($handler, $request).await
    };
    ($grpc:ident, $handler:ident, $request:ident, $answer:ident) => {
        $grpc.unary($handler, $request).await
    };
}

/// Makes one call.
macro_rules! ask {
    ($grpc:expr, $request:expr, $path:ident, $codec:ident, stream $answer:ident) => {
        $grpc.server_streaming($request, $path, $codec).await
    };
    ($grpc:expr, $request:expr, $path:ident, $codec:ident, $answer:ident) => {
        $grpc.unary($request, $path, $codec).await
    };
}

pub(crate) use {answer_type, ask, received_type, serve, service};

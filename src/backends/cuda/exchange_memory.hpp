// A rank's memory of an exchange on its device, and the other ranks', as this device reaches it (lean/exchange.hpp).
#pragma once

#include "lean/exchange.hpp"
#include "lean/status.hpp"

namespace lean::cuda {

/// Of arguments that the API has checked. The calling thread's current device is what it was when they return.
[[nodiscard]] Status create_exchange(Exchange& exchange, ExchangeHandle& handle) noexcept;
[[nodiscard]] Status open_exchange(Exchange& exchange, std::int32_t rank, const ExchangeHandle& handle) noexcept;
[[nodiscard]] Status join_exchange(Exchange& exchange, const Exchange& other) noexcept;
[[nodiscard]] Status clear_exchange(Exchange& exchange) noexcept;
[[nodiscard]] Status close_exchange(Exchange& exchange) noexcept;

}  // namespace lean::cuda

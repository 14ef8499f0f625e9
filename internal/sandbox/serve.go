package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"runtime/debug"

	"github.com/towline/towline/internal/phase"
)

const (
	// minMemory and maxMemory are the bounds of the memory limit of a child, in bytes. Most charts need less than 100 MiB.
	minMemory = 256 << 20
	maxMemory = 1 << 30
	// maxStack is the maximum size of a stack in a child, in bytes. The runtime copies a stack that grows: the old and the
	// new one together take a small part of minMemory.
	maxStack = 64 << 20
)

// Function is a function that runs in a child. It may return an output together with an error. The output is encoded as
// JSON. callBack calls Call.Callback in the process of the Pool, and returns its result.
type Function func(input json.RawMessage, callBack func(input any) (json.RawMessage, error)) (output any, err error)

// request is a message to a child: a call (Function, Input), or the result of a callback (CallbackResult, Error).
type request struct {
	Function       string          `json:"function,omitempty"`
	Input          json.RawMessage `json:"input,omitempty"`
	CallbackResult json.RawMessage `json:"callbackResult,omitempty"`
	Error          string          `json:"error,omitempty"`
}

// response is a message from a child: a callback, or the result of the call (Output, Error).
type response struct {
	Callback json.RawMessage `json:"callback,omitempty"`
	Output   json.RawMessage `json:"output,omitempty"`
	Error    string          `json:"error,omitempty"`
	// Invalid is true if the error is a phase.TerminalError.
	Invalid bool `json:"invalid,omitempty"`
}

// Serve runs functions for the process that started this one, until in ends. It returns an error if a function does not
// exist, or if it cannot write to out. From its start, this process can open no files, use no network, and start no
// programs, also after Serve returns.
func Serve(functions map[string]Function, in io.Reader, out io.Writer) error {
	memory := min(maxMemory, debug.SetMemoryLimit(-1)) // the Pool sets it in the environment
	if err := limitData(uint64(memory)); err != nil {  //nolint:gosec // it is positive
		return fmt.Errorf("limit the memory: %w", err)
	}
	debug.SetMemoryLimit(memory * 3 / 4) // near this limit, the garbage collector runs more often
	debug.SetMaxStack(maxStack)
	defer isolate()()
	if err := confine(); err != nil {
		return fmt.Errorf("limit the system calls: %w", err)
	}
	received := make(chan request)
	go func() {
		defer close(received)
		for decoder := json.NewDecoder(in); ; {
			var next request
			if decoder.Decode(&next) != nil {
				return // the caller has ended
			}
			received <- next
		}
	}()
	for call := range received {
		if err := serveCall(functions[call.Function], call.Input, received, out); err != nil {
			return err
		}
	}
	return nil
}

// isolate makes requests with the default transport fail, so that the libraries of the functions do not use the
// network. It also discards warnings of the libraries: only the first bytes of standard error are kept (maxStderr), and
// they must have the reason of a crash. restore undoes both.
func isolate() (restore func()) {
	transport, stderr := http.DefaultTransport, os.Stderr
	http.DefaultTransport, os.Stderr = refusingTransport{}, nil
	log.SetOutput(io.Discard)
	return func() {
		http.DefaultTransport, os.Stderr = transport, stderr
		log.SetOutput(stderr)
	}
}

// refusingTransport refuses all requests.
type refusingTransport struct{}

// RoundTrip implements http.RoundTripper.
func (refusingTransport) RoundTrip(request *http.Request) (*http.Response, error) {
	return nil, fmt.Errorf("no request to %s: there is no network", request.URL.Host)
}

// serveCall runs one function, and writes its callbacks and its result to out. If the caller ends, it returns at once.
func serveCall(function Function, input json.RawMessage, received <-chan request, out io.Writer) error {
	if function == nil {
		return errors.New("the function does not exist")
	}
	callbacks, callbackResults, results := make(chan json.RawMessage), make(chan request), make(chan response, 1)
	go func() {
		output, err := function(input, func(input any) (json.RawMessage, error) {
			raw, err := marshal(input)
			if err != nil {
				return nil, err
			}
			callbacks <- raw
			result := <-callbackResults
			if result.Error != "" {
				return nil, errors.New(result.Error)
			}
			return result.CallbackResult, nil
		})
		results <- newResponse(output, err)
	}()
	for {
		select {
		case next, ok := <-received:
			if !ok {
				return nil
			}
			callbackResults <- next
		case callback := <-callbacks:
			if err := write(out, response{Callback: callback}); err != nil {
				return err
			}
		case result := <-results:
			return write(out, result)
		}
	}
}

func newResponse(output any, err error) response {
	var result response
	raw, encodeErr := marshal(output)
	if err = errors.Join(err, encodeErr); err != nil {
		_, result.Invalid = errors.AsType[phase.TerminalError](err)
		result.Error = err.Error()
	}
	result.Output = raw
	return result
}

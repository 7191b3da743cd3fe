package penstock

import (
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"time"
)

// Codes of errors in answers of a worker.
const (
	codeHandlerError   = -32000
	codeTimeout        = -32001
	codeTooLarge       = -32013
	codeMethodNotFound = -32601
	codeInvalidParams  = -32602
)

const (
	messageBytes   = 2000
	tracebackBytes = 8000
)

// Fail returns an error of a permanent failure: no further attempt is made. In a step: the step has failed.
func Fail(format string, args ...any) error {
	return &failure{kind: "Fail", message: fmt.Sprintf(format, args...), data: map[string]any{"final": true}}
}

// Retry returns an error that asks for another attempt after so long, instead of the usual backoff.
func Retry(after time.Duration, format string, args ...any) error {
	hints := map[string]any{"retry_after": after.Seconds()}
	return &failure{kind: "Retry", message: fmt.Sprintf(format, args...), data: hints}
}

// StepError is the final failure of a durable step, in this attempt or an earlier one. Kind is the type of its error,
// WaitTimeout if no event came in time.
type StepError struct {
	Step    string
	Kind    string
	Message string
}

func (e *StepError) Error() string {
	return fmt.Sprintf("step %s failed: %s", e.Step, e.Message)
}

// tooLarge is an error of what was done and cannot be reported, so that no further attempt is made.
func tooLarge(kind, format string, args ...any) error {
	final := map[string]any{"final": true}
	return &failure{kind: kind, message: fmt.Sprintf(format, args...), code: codeTooLarge, data: final}
}

// panicked is the error of a recovered panic, or of runtime.Goexit.
func panicked(value any) error {
	return &failure{kind: "panic", message: fmt.Sprintf("panic: %v", value), traceback: string(debug.Stack())}
}

// failure is an error with a code and hints for the next attempt.
type failure struct {
	kind      string
	message   string
	code      int
	data      map[string]any
	traceback string
}

func (f *failure) Error() string { return f.message }

func (f *failure) isFinal() bool { return f.data["final"] == true }

type errorObject struct {
	Code    int            `json:"code"`
	Message string         `json:"message"`
	Data    map[string]any `json:"data"`
}

// errorOf is the JSON-RPC error of what a handler has returned.
func errorOf(err error, maxAttempts int) errorObject {
	found := errorObject{Code: codeHandlerError, Message: cut(err.Error(), messageBytes), Data: map[string]any{}}
	if maxAttempts > 0 {
		found.Data["max_attempts"] = maxAttempts
	}
	found.Data["type"] = fmt.Sprintf("%T", err)
	var known *failure
	var step *StepError
	if errors.As(err, &known) {
		found.Data["type"] = known.kind
		if known.code != 0 {
			found.Code = known.code
		}
		if known.traceback != "" {
			found.Data["traceback"] = cut(known.traceback, tracebackBytes)
		}
		for name, value := range known.data {
			found.Data[name] = value
		}
	} else if errors.As(err, &step) {
		found.Data["type"] = "StepFailed"
		found.Data["final"] = true
	}
	if found.Message == "" {
		found.Message = fmt.Sprint(found.Data["type"])
	}
	found.Data["message"] = found.Message
	return found
}

// stepError reads the error of a journal's entry.
func stepError(step string, text json.RawMessage) *StepError {
	var found struct {
		Message string `json:"message"`
		Data    struct {
			Type    string `json:"type"`
			Message string `json:"message"`
		} `json:"data"`
	}
	if json.Unmarshal(text, &found) != nil {
		return &StepError{step, "Error", string(text)}
	}
	if found.Data.Message != "" {
		found.Message = found.Data.Message
	}
	if found.Data.Type == "" {
		found.Data.Type = "Error"
	}
	return &StepError{step, found.Data.Type, found.Message}
}

func cut(text string, bytes int) string {
	if len(text) <= bytes {
		return text
	}
	return strings.ToValidUTF8(text[:bytes], "")
}

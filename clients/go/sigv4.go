package penstock

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"net/url"
	"sort"
	"strings"
	"time"
)

// sign adds the headers of Signature Version 4. Every header that the request has by then is signed.
func sign(request *http.Request, body []byte, creds credentials, region, service string, now time.Time) {
	stamp := now.UTC().Format("20060102T150405Z")
	request.Header.Set("X-Amz-Date", stamp)
	if creds.Token != "" {
		request.Header.Set("X-Amz-Security-Token", creds.Token)
	}
	headers := map[string]string{"host": request.Host}
	if request.Host == "" {
		headers["host"] = request.URL.Host
	}
	for name, values := range request.Header {
		headers[strings.ToLower(name)] = strings.TrimSpace(strings.Join(values, ","))
	}
	names := make([]string, 0, len(headers))
	for name := range headers {
		names = append(names, name)
	}
	sort.Strings(names)
	signed := strings.Join(names, ";")

	var canonical strings.Builder
	canonical.WriteString(request.Method + "\n" + canonicalPath(request.URL) + "\n" + canonicalQuery(request.URL) + "\n")
	for _, name := range names {
		canonical.WriteString(name + ":" + headers[name] + "\n")
	}
	canonical.WriteString("\n" + signed + "\n" + hexDigest(body))

	scope := strings.Join([]string{stamp[:8], region, service, "aws4_request"}, "/")
	text := strings.Join([]string{"AWS4-HMAC-SHA256", stamp, scope, hexDigest([]byte(canonical.String()))}, "\n")
	key := []byte("AWS4" + creds.SecretAccessKey)
	for _, part := range []string{stamp[:8], region, service, "aws4_request"} {
		key = hmacSHA256(key, []byte(part))
	}
	signature := hex.EncodeToString(hmacSHA256(key, []byte(text)))
	request.Header.Set("Authorization", "AWS4-HMAC-SHA256 Credential="+creds.AccessKeyID+"/"+scope+
		", SignedHeaders="+signed+", Signature="+signature)
}

func canonicalPath(address *url.URL) string {
	if path := address.EscapedPath(); path != "" {
		return path
	}
	return "/"
}

func canonicalQuery(address *url.URL) string {
	return strings.ReplaceAll(address.Query().Encode(), "+", "%20")
}

func hmacSHA256(key, data []byte) []byte {
	mac := hmac.New(sha256.New, key)
	mac.Write(data)
	return mac.Sum(nil)
}

func hexDigest(data []byte) string {
	digest := sha256.Sum256(data)
	return hex.EncodeToString(digest[:])
}
